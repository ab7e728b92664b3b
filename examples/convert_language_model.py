"""A language model of transformers: γ from 0 up and back to 0, then generation with its cache.

python examples/convert_language_model.py
"""

from __future__ import annotations

import torch

import retrograde as rg
from retrograde.extras import require

transformers = require("transformers")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config)
tokens = torch.arange(3, 19).repeat(4, 2)  # to be learnt by heart

# %% γ starts at 0, where the converted model is the plain one to the bit.
plain = model(tokens).logits
rg.convert(model)
schedule = rg.GammaSchedule(model, {0: 0, 15: 1, 45: 1, 60: 0})  # by step, which share of γ = 1/8
assert torch.equal(model(tokens).logits, plain)

optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for step in range(60):
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gamma = schedule.step()
    if step % 15 == 0:
        print(f"step {step:2d}: loss {loss.item():.3f}, gamma {gamma}")

# %% And it ends there.
trained = model(tokens).logits
rg.revert(model)
assert torch.equal(model(tokens).logits, trained)

# %% Without gradients the cache works as ever, converted or not.
rg.convert(model)
model.eval()
prompt = tokens[:1, :8]
cached = model.generate(prompt, max_new_tokens=8, do_sample=False)
assert torch.equal(cached, model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=False))
print(cached[0].tolist())
