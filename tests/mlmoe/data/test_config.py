"""DataConfig refuses what cannot work, names what can, and costs no import of JAX."""

import subprocess
import sys

import pytest

from mlmoe.errors import UserError


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": "json"}, "'jsonl'"),
        ({"source": "some/texts"}, "data.source=files --config.data.path=some/texts"),
        ({"source": "my/a.jsonl.gz"}, "data.source=jsonl --config.data.path=my/a.jsonl.gz"),
        ({"packing": "concat"}, "'best_fit'"),
        ({"on_bad": "ignore"}, "'skip'"),
        ({"bin_dtype": "int32"}, "'uint32'"),
        ({"heldout": 1.0}, "data.heldout=1.0"),
        ({"heldout": -0.1}, "data.heldout=-0.1"),
        ({"pack_bins": 0}, "at least 1"),
        ({"max_line_mb": 0}, "at least 1"),
        ({"prefetch": -1}, "at least 0"),
        ({"text_field": ""}, "data.text_field"),
        ({"source": "files"}, "data.path is empty"),
        ({"path": "/somewhere"}, "must be ''"),
        ({"mixture": (("stdlib", "", 0.0),)}, "weight 0.0"),
        ({"mixture": (("stdlib", ""),)}, "(source, path, weight)"),
        ({"mixture": (("web", "x", 1.0),)}, "'web'"),
        ({"mixture": (("stdlib", "", 1.0),), "path": "x"}, "data.path='x' would not be read"),
    ],
)
def test_bad_values_name_the_valid_ones(make_config, changes, named):
    with pytest.raises(UserError) as raised:
        make_config(**changes)
    assert named in str(raised.value)


def test_the_mixture_overrides_the_single_source(make_config):
    mixture = (("stdlib", "", 2.0), ("files", "x", 1.0))
    assert make_config(mixture=mixture).parts() == mixture
    assert make_config().parts() == (("stdlib", "", 1.0),)


def test_reading_a_config_imports_neither_jax_nor_grain():
    code = "import sys, mlmoe.data.config; print({'jax', 'grain'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
