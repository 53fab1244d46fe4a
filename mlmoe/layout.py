"""The layout string, one letter a layer: what each letter is, and presets for any depth."""

LETTERS = {
    "F": "full softmax attention",
    "L": "latent attention without positions (NoPE)",
    "R": "latent attention with RoPE",
    "B": "latent attention with ALiBi",
    "D": "incremental attention, delta update",
    "A": "incremental attention, additive update",
    "S": "incremental attention, slot read-out",
}
LATENT, INCREMENTAL = "LRB", "DAS"
PRESETS = {
    "interleaved": lambda n: ("DDDL" * n)[: n - 1] + "L",
    "thirds": lambda n: "D" * (n // 3) + "L" * (n - n // 3),
    # What a staged curriculum goes through on its way to `interleaved`.
    "rotary": lambda n: "R" * n,
    "half_interleaved": lambda n: ("DDDR" * n)[: n // 2] + "R" * (n - n // 2),
    "interleaved_rotary": lambda n: ("DDDR" * n)[: n - 1] + "R",
    "interleaved_third_rotary": lambda n: ("DDDLDDDLDDDR" * n)[: n - 1] + "LLR"[(n - 1) // 4 % 3],
}
