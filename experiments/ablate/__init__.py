"""Small studies that decide defaults; `python -m experiments.ablate --help` lists them."""
