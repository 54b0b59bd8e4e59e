"""Loads a decoder-only model from a directory or a GGUF file (configuration, weights, tokenizer), and refuses models
that would compute wrongly."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from pointsman.engine.attention.backends import AttentionChoice, choose_attention, choose_device
from pointsman.engine.attention.paged import ATTENTION_NAME, AttentionBackend
from pointsman.engine.errors import ModelLoadError, UnsupportedModel, first_line
from pointsman.engine.gguf import is_gguf
from pointsman.engine.kv.pool import check_float16
from pointsman.engine.memory import explain_out_of_memory, use_device
from pointsman.engine.model.check import attach_paged_attention, check_config, fix_longrope, probe_layers
from pointsman.engine.model.linear import store_weights
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.quantization import check_quantization
from pointsman.engine.model.self_check import SelfCheck
from pointsman.engine.model.settings import (
    GenerationSettings,
    check_fields,
    choose_eos_token_ids,
    read_generation_settings,
)
from pointsman.engine.sources.find import find_model
from pointsman.engine.text.tokenizer import check_model_directory, read_json_object, read_tokenizer
from pointsman.files import MAX_MESSAGE, represented, shown

if TYPE_CHECKING:
    from pointsman.engine.gguf.reader import GGUFFile

logger = logging.getLogger(__name__)

MAX_PARAMETER_RATIO = 2
"""Maximum number of a model's parameters, as a multiple of the number of elements in its weight files. The factor
allows for shared weights, which may be counted twice."""
MAX_TENSORS = 2**18
"""Maximum number of tensors in all weight files of a model; the largest models have some ten thousand."""
ALLOWED_CONSTANTS = 2**24
"""Number of elements in constants, such as masks, that a model may have beyond `MAX_PARAMETER_RATIO`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOO_LARGE = "free it of other programs, or give a smaller model, a dtype of 16 bits or another device"
"""End of the error message if a model does not fit in a device's memory."""


def load_model(
    model: str | Path | None = "demo",
    dtype: str = "auto",
    *,
    device: str = "auto",
    max_model_len: int | None = None,
    attention: AttentionChoice = "auto",
    fuse: bool = True,
    quantization: str | None = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
) -> LoadedModel:
    """Load and check a model; "demo" or None is the packaged model.

    Args:
        model: a directory with config.json, *.safetensors and, for text prompts, a tokenizer; a GGUF file; or another
            name that `find_model` accepts, such as a hub name OWNER/NAME.
        dtype: type of the weights: "float32", "bfloat16", on a GPU also "float16"; "auto": bfloat16 on a GPU, float32
            elsewhere.
        device: device of the model: "cpu", "cuda", "cuda:1", ...; "auto" is a GPU if PyTorch finds a GPU.
        max_model_len, attention, fuse, quantization: see `wrap_model`.
        revision, download_dir: for a hub name, see `find_model`.

    Raises:
        ModelLoadError: the model cannot be found or read, or does not fit the device. The message, one line, names the
            missing or broken part.
        UnsupportedModel: the model was read, but the paged path would not compute it correctly.
        ValueError: an unknown dtype, device or attention, or a dtype that the device does not support.
    """
    place = choose_device(device)
    element = choose_dtype(dtype, place)
    use_device(place)
    path = find_model(model, revision=revision, download_dir=download_dir, check=read_settings)
    gguf = _read_gguf(path) if is_gguf(path) else None
    config, generation = read_settings(path, gguf)
    _check_size(path, config, _check_weights(path, gguf))
    options: dict[str, Any] = {
        "tokenizer": read_tokenizer(path),
        "path": str(path),
        "generation": generation,
        "max_model_len": max_model_len,
        "attention": attention,
        "quantization": quantization,
    }
    with _add_path_to_errors(path), explain_out_of_memory(f"loading the model on {place}", TOO_LARGE, ModelLoadError):
        try:
            return wrap_model(_read_weights(path, config, element, gguf, place), fuse=fuse, **options)
        except FusionFailed as error:
            logger.warning("%s; loading the model again with its own layers, which are slower", error)
        return wrap_model(_read_weights(path, config, element, gguf, place), fuse=False, **options)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of a model's weights from its name; "auto" is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ValueError: an unknown name, or a type that the device does not support.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; choose one of auto, {', '.join(DTYPES)}")
    check_float16("dtype", name, device)
    return DTYPES[name]


def device_of(model: str | Path | LoadedModel | None, device: str) -> torch.device:
    """The device of a loaded model, or the device to which a model will be loaded.

    Raises:
        ValueError: this machine has no such device.
    """
    if isinstance(model, LoadedModel):
        found: torch.device = model.model.device
        return found
    return choose_device(device)


def read_settings(path: Path, gguf: GGUFFile | None = None) -> tuple[Any, GenerationSettings]:
    """Read and check a model's transformers configuration and its generation settings, without its weights.

    Args:
        path: the model's directory or file.
        gguf: the file at `path`, already read; None: `path` is a directory.

    Raises:
        ModelLoadError: a file cannot be read, or a value in it is wrong.
        UnsupportedModel: the paged path would not compute a model with this configuration correctly.
    """
    config = _read_config(path, gguf)
    with _add_path_to_errors(path):
        check_config(config)
    return config, _read_generation(path, config, gguf)


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the model's path to messages of `ModelLoadError` that lack it, and shorten long messages."""
    try:
        yield
    except ModelLoadError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise type(error)(shown(text, MAX_MESSAGE)) from error


def wrap_model(
    model: Any,
    *,
    tokenizer: Any | None = None,
    path: str = "",
    generation: GenerationSettings | None = None,
    max_model_len: int | None = None,
    attention: AttentionChoice = "auto",
    fuse: bool = True,
    quantization: str | None = None,
) -> LoadedModel:
    """Check a transformers model that is already in memory, and connect it to paged attention.

    Args:
        model: the transformers model. It is changed in place: from now on its attention is computed through the
            `context` of the returned object.
        tokenizer: the model's tokenizer, stored in the returned object; its EOS ends texts.
        path: the model's path, stored in the returned object.
        generation: settings with further tokens that end texts, and with defaults of requests; None: the model's own
            `generation_config`.
        max_model_len: maximum number of tokens of a request's sequence; None: the model's own maximum. Needed at load
            time only for a model with a "longrope" embedding (see `fix_longrope`).
        attention: attention backend: "torch", "numba" (compiled, for CPUs), "triton" (for GPUs), a backend's class, or
            "auto": the fastest available backend.
        fuse: whether to replace parts of the model by faster parts, if the attention is "numba" or "triton" and a trial
            shows that their outputs are equal (see `fusion.py`). Transformers' own functions cannot run the model
            afterwards.
        quantization: format of the linear layers' weights: "int8" or "int4" (see `linear.py`), for fused models in
            float32; None: the model's own type. Outputs differ from those of the model's own type.

    Raises:
        UnsupportedModel: the paged path would not compute the model correctly.
        ModelLoadError: the model's generation settings are wrong.
        ValueError: this attention or quantization is not available on this machine.
    """
    check_config(model.config)
    model.eval().requires_grad_(False)
    longest = fix_longrope(model, max_model_len)
    model.config._attn_implementation = ATTENTION_NAME
    probed = probe_layers(model)
    layers = tuple(layer.shape for layer in probed)
    windows = tuple(layer.window for layer in probed)
    context = attach_paged_attention(probed)
    del probed  # `probed` refers to attention layers, which are freed when `_fuse` replaces them
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    check_quantization(quantization, model.device, model.dtype)
    backend = choose_attention(attention, layers, model.device, model.dtype)
    check = SelfCheck(model, layers, context, backend)
    check.run()
    fused = _fuse(model, check, store=quantization is None) if fuse else {}
    drops_tokens_early = False
    if fused:
        _check_fused(check)
        drops_tokens_early = _drop_tokens_early(model, check)
    if quantization is not None:
        store_weights(model, quantization)
    config = model.config.get_text_config(decoder=True)
    if generation is None:
        own = getattr(model, "generation_config", None)
        num_embeddings = int(model.get_input_embeddings().num_embeddings)
        generation = GenerationSettings.of({} if own is None else own.to_dict(), num_embeddings)
    return LoadedModel(
        path=path,
        model=model,
        config=config,
        tokenizer=tokenizer,
        layers=layers,
        windows=windows,
        context=context,
        eos_token_ids=choose_eos_token_ids(model, tokenizer, generation),
        generation_defaults=generation.sampling,
        max_position_embeddings=longest or getattr(config, "max_position_embeddings", None),
        attention=backend,
        fused=fused,
        drops_tokens_early=drops_tokens_early,
        num_parameters=num_parameters,
    )


def load_with_attention(
    model: str | Path | LoadedModel | None,
    dtype: str,
    attention: AttentionChoice | AttentionBackend,
    *,
    max_model_len: int | None,
    device: str,
    fuse: bool,
    quantization: str | None,
    revision: str | None,
    download_dir: str | Path | None,
) -> tuple[LoadedModel, AttentionBackend]:
    """The model, loaded unless it is a `LoadedModel`, and its attention backend. All arguments are those of `Engine`.

    Raises:
        ModelLoadError, UnsupportedModel: the model cannot be read, or cannot run correctly.
        ValueError: an option is unknown, or the loaded model no longer allows it.
    """
    if isinstance(model, LoadedModel):
        if (device, fuse, quantization) != ("auto", True, None):
            raise ValueError("the model is loaded already; give device, fuse and quantization to load_model")
        if revision is not None or download_dir is not None:
            raise ValueError("the model is loaded already; give revision and download_dir to load_model")
        return model, _attention_of(model, attention)
    if not isinstance(attention, str) and not callable(attention):
        raise ValueError(
            "attention is a backend object, which was made for one loaded model; pass this LoadedModel as model"
        )
    loaded = load_model(
        model,
        dtype,
        device=device,
        max_model_len=max_model_len,
        attention=attention,
        fuse=fuse,
        quantization=quantization,
        revision=revision,
        download_dir=download_dir,
    )
    return loaded, loaded.attention


def _attention_of(loaded: LoadedModel, attention: AttentionChoice | AttentionBackend) -> AttentionBackend:
    """The attention backend for a loaded model: for "auto" the backend with which the model was checked, otherwise the
    requested backend, if the model's layers can use it."""
    if attention == "auto":
        return loaded.attention
    if not (isinstance(attention, str) or callable(attention)):
        backend = attention
    else:
        backend = choose_attention(attention, loaded.layers, loaded.model.device, loaded.dtype)
    if loaded.fused and type(getattr(backend, "kernels", None)) is not type(getattr(loaded.attention, "kernels", None)):
        raise ValueError(
            f"the model was loaded with fused layers, which need the attention {loaded.attention.name}, not "
            f"{backend.name}; load the model with fuse=False"
        )
    return backend


def _fuse(model: Any, check: SelfCheck, *, store: bool) -> dict[str, int]:
    """Replace parts of the model by faster parts, if the backend has kernels for them; returns the number of parts of
    each kind.

    Args:
        store: whether to convert the weights of the new parts to the form that products will use; False: the caller
            calls `linear.store_weights`.
    """
    if not hasattr(check.backend, "write_heads"):
        return {}
    from pointsman.engine.model.fusion import fuse

    with check.first_step() as step:
        return dict(fuse(model, step, store=store))


def _drop_tokens_early(model: Any, check: SelfCheck) -> bool:
    """Let the last layer of a fused model skip the tokens whose logits are not needed; returns False if the layer
    cannot skip tokens."""
    from pointsman.engine.model.fusion import drop_tokens_early

    with check.first_step() as step:
        return drop_tokens_early(model, step)


class FusionFailed(UnsupportedModel):
    """Raised if the outputs of each replaced part match, but the logits of the whole model do not."""


def _check_fused(check: SelfCheck) -> None:
    """Repeat the self-check of a model whose parts have been replaced.

    Raises:
        FusionFailed: the check failed; the model must be loaded again, with its own layers.
    """
    try:
        check.run(fused=True)
    except Exception as error:
        raise FusionFailed(
            f"{check.model.config.model_type}: with fused layers the model fails its check ({first_line(error)}); load "
            "the model with fuse=False"
        ) from error


def _read_gguf(path: Path) -> GGUFFile:
    from pointsman.engine.gguf.reader import read_gguf

    return read_gguf(path)


def _read_config(path: Path, gguf: GGUFFile | None) -> Any:
    if gguf is not None:
        from pointsman.engine.gguf.config import make_config

        return make_config(gguf)
    check_model_directory(path)
    file = path / "config.json"
    content = read_json_object(file)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError(f"{file} names no model_type; copy the model's own config.json")
    check_fields(content, file)
    try:
        # A model's own code is never run. With the default, transformers would ask for permission on standard input.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if model_type not in CONFIG_MAPPING:
            own = "; the model's own code (auto_map) is not run here" if "auto_map" in content else ""
            raise UnsupportedModel(
                f"{file}: transformers does not know the model type {represented(model_type)}{own}"
            ) from error
        raise UnsupportedModel(
            f"{file}: transformers rejects the configuration of model type {model_type!r}: {first_line(error)}"
        ) from error
    if not config.is_encoder_decoder and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{path}: {model_type} is no causal language model; only causal language models can run here"
        )
    return config


def _read_generation(path: Path, config: Any, gguf: GGUFFile | None) -> GenerationSettings:
    if gguf is None:
        return read_generation_settings(path, config)
    from pointsman.engine.gguf.config import generation_fields

    return GenerationSettings.of(generation_fields(gguf), config.vocab_size, str(path))


def _check_weights(path: Path, gguf: GGUFFile | None = None) -> _Weights:
    """Count the tensors of all weight files; a broken file is reported before anything large is read.

    Raises:
        ModelLoadError: there are no weight files, a file cannot be read, or the index names files that are missing.
    """
    if gguf is not None:
        return _Weights(len(gguf.tensors), sum(tensor.num_elements for tensor in gguf.tensors.values()))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{path} has no weight files (*.safetensors); other formats of weights are not supported")
    num_tensors = num_elements = 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                if (num_tensors := num_tensors + len(names)) > MAX_TENSORS:
                    raise ModelLoadError(
                        f"the weights up to {file} have more than {MAX_TENSORS:,} tensors; give the files of one model"
                    )
                for name in names:
                    num_elements += math.prod(tensors.get_slice(name).get_shape())
        except ModelLoadError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(
                f"{file} is truncated or corrupt ({file.stat().st_size} bytes; {first_line(error)}); copy it again"
            ) from error
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(
                f"{index}: weight_map must be an object that maps tensor names to file names; copy the file again"
            )
        named = set(weight_map.values())
        absent = sorted(named - {file.name for file in files})
        if absent:
            raise ModelLoadError(
                f"{index}: {path} lacks {len(absent)} of {len(named)} weight files, first {shown(absent[0])}; copy them"
            )
    return _Weights(num_tensors, num_elements)


def _check_size(path: Path, config: Any, weights: _Weights) -> None:
    """Refuse a configuration of a much larger model than the weight files contain.

    transformers would allocate all missing weights, which may exceed the machine's memory, before it reports them.

    Raises:
        ModelLoadError: the configuration has more layers than tensors, or more than twice the parameters.
    """
    file, text = path / "config.json" if path.is_dir() else path, config.get_text_config(decoder=True)
    num_layers = getattr(text, "num_hidden_layers", 0)
    if num_layers > weights.num_tensors:
        raise ModelLoadError(
            f"{file}: num_hidden_layers is {num_layers}, but the weight files have {weights.num_tensors} tensors; copy "
            "configuration and weights of the same model"
        )
    with torch.device("meta"):
        try:
            model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            )
        except Exception:  # `_read_weights` reports the error
            return
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_buffered = sum(buffer.numel() for buffer in model.buffers())
    if max(num_parameters, num_buffered - ALLOWED_CONSTANTS) > MAX_PARAMETER_RATIO * weights.num_elements:
        raise ModelLoadError(
            f"{file} describes {num_parameters:,} parameters and {num_buffered:,} constants, but the weight files "
            f"have {weights.num_elements:,} numbers; copy configuration and weights of the same model"
        )


class _Weights(NamedTuple):
    """Totals over all weight files of a model, from the files' headers."""

    num_tensors: int
    num_elements: int


def _read_weights(path: Path, config: Any, dtype: torch.dtype, gguf: GGUFFile | None, device: torch.device) -> Any:
    """Load the model onto its device.

    transformers maps safetensors files into memory and converts only tensors of another type than `dtype`. The tensors
    are then moved to a GPU one by one, and the memory of each moved tensor is freed. So a file in the model's type
    takes no host memory beyond the page cache; any other file takes one copy. (A `device_map`, or a device context
    around `from_pretrained`, would need the package accelerate.)
    """
    given: dict[str, Any] = {"pretrained_model_name_or_path": path}
    loads: Any = AutoModelForCausalLM
    if gguf is not None:
        from pointsman.engine.gguf.tensors import read_weights

        given = {"pretrained_model_name_or_path": None, "state_dict": read_weights(gguf, config, dtype)}
        loads = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    was_showing = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        loaded = loads.from_pretrained(
            **given,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with names
        )
    except KeyError as error:
        if ATTENTION_NAME not in error.args:
            raise ModelLoadError(
                f"{path / 'config.json'}: transformers does not know the name {error}; correct the field with this name"
            ) from error
        raise UnsupportedModel(
            f"{config.model_type} computes attention in its own classes, and has no class for {error}; only models "
            "that compute attention through transformers' attention interface can run here"
        ) from error
    except Exception as error:
        raise ModelLoadError(f"{path}: the weights cannot be loaded: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_showing:
            transformers_logging.enable_progress_bar()
    model, info = loaded
    # transformers fills missing tensors with random numbers and continues.
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(entry[0]) for entry in info.get("mismatched_keys", ()))
    if missing or mismatched:
        what = f"lack {len(missing)} tensors" if missing else f"have {len(mismatched)} tensors of another shape"
        raise ModelLoadError(
            f"{path}: the weights {what}, first {(missing or mismatched)[0]}; copy config.json and the "
            "weights again, both from the same model"
        )
    given.clear()  # otherwise the tensors of a GGUF file would stay in host memory
    return model.to(device)
