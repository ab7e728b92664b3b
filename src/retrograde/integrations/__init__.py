"""Trainers and their callbacks. Most need none of this: `rg.convert(model)`, then train.

    from retrograde.integrations.lightning import Reversible        a callback: converts, moves γ
    from retrograde.integrations.transformers import Reversible     the same for the Trainer, and TRL's
    from retrograde.integrations.accelerate import remember         γ in what `Accelerator.save_state` writes
    from retrograde.integrations.torchtitan import ReversibleAC     an ActivationCheckpointing policy
    from retrograde.integrations.axolotl import ReversiblePlugin    a plugin, by name in the YAML file

Each file imports its own package, and nothing imports these files.
"""
