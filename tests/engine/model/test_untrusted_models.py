"""Model directories with code, with pipes instead of files, or with a configuration that would fill the memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pointsman.engine.errors import ModelLoadError
from pointsman.engine.model.loader import load_model
from pointsman.engine.text.tokenizer import DEMO_MODEL, read_tokenizer
from tests.engine.tiny_models import FAMILIES

OWN_CODE = """
from pathlib import Path
Path({trace!r}).write_text("it ran")
from transformers import {base}
class Own({base}):
    model_type = "own"
"""
LOADS = """
import sys
from pointsman.engine.model.loader import load_model
from pointsman.engine.text.tokenizer import read_tokenizer
try:
    ({"model": load_model, "tokenizer": read_tokenizer}[sys.argv[1]])(__import__("pathlib").Path(sys.argv[2]))
except ValueError as error:
    print(error)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.e2e
@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_models_own_code_is_never_run(copy: Path, tmp_path: Path, part: str) -> None:
    trace = tmp_path / "trace"
    base = "PretrainedConfig" if part == "model" else "PreTrainedTokenizerFast"
    (copy / "own.py").write_text(OWN_CODE.format(trace=str(trace), base=base))
    if part == "model":
        change(copy / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    else:
        fields = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
        change(copy / "tokenizer_config.json", **fields)
        change(copy / "config.json", model_type="unknown")
    finished = subprocess.run(
        [sys.executable, "-c", LOADS, part, copy], input="yes\n" * 100, capture_output=True, text=True, timeout=120
    )
    assert not trace.exists()
    assert "auto_map" in finished.stdout and str(copy) in finished.stdout, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
     "chat_template.jinja", "added_tokens.json"],
)  # fmt: skip
def test_a_named_pipe_is_refused_without_waiting(copy: Path, name: str) -> None:
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(ModelLoadError, match=f"{name} cannot be read: it is a named pipe"):
        load_model(copy)
    with pytest.raises(ModelLoadError, match=f"{name} cannot be read: it is a named pipe"):
        read_tokenizer(copy)


def test_broken_links_sockets_and_devices_are_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.unlink()
    weights.symlink_to("blobs/none")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read: No such file"):
        load_model(copy)
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read: Too many levels of symbolic links"):
        load_model(copy)
    weights.unlink()
    weights.symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match="it is a device"):
        load_model(copy)
    weights.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(weights))
        with pytest.raises(ModelLoadError, match="it is a socket"):
            load_model(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 10**8}, "config.json describes .* but the weight files have .* of the same model"),
        ({"intermediate_size": 10**9}, "config.json describes"),
        (
            {"num_hidden_layers": 9_999, "layer_types": None},
            "num_hidden_layers is 9999, but the weight files",
        ),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be an integer from 1 to 10000"),
        ({"hidden_size": 2**62}, "the weights cannot be loaded"),
    ],
)
def test_a_configuration_larger_than_its_weights_uses_no_memory(copy: Path, fields: dict, message: str) -> None:
    change(copy / "config.json", **fields)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match=message):
        load_model(copy)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_every_family_pass_the_size_check(tmp_path: Path, name: str) -> None:
    """The estimated size of a model is less than twice the size of its files."""
    from pointsman.engine.model.loader import _check_size, _check_weights

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]())
    model.save_pretrained(tmp_path)
    _check_size(tmp_path, model.config, _check_weights(tmp_path))
