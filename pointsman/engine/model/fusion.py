"""Replaces parts of any loaded model by faster parts with equal outputs, without a list of model families.

Most decoder-only families are built of the same parts under the same names: RMS norms, a gated MLP, and attention with
separate projections, optional norms per head and rotary embeddings. Each such part can be computed with fewer and
larger operations (`fused_layers.py`). Trials find the parts of a model that can be replaced:

1. A part is recognised by its submodules, and a replacement is built from them.
2. The model runs once, on a small mixed batch, and the inputs of every part are recorded.
3. Part and replacement run on the same inputs in float32, for any type of model. The inputs are the recorded inputs and
   variations that a real model may produce (`variations`): much larger inputs, inputs with another mean, later
   positions. Of parts of the same kind only the first runs on the variations (`kind_of`). If all outputs match, the
   replacement is put in the part's place. If an output differs, the part stays: its code contains an operation that
   the replacement lacks, such as a clamp or a scale by position.

So a part is replaced only after its replacement has been tested. Afterwards the self-check of the whole model runs once
more.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pointsman.engine.attention.fused import FusedAttentionBackend, HeadNorms, LayerKernels
from pointsman.engine.attention.paged import PagedLayer, attention_options, get_handler, set_handler
from pointsman.engine.errors import first_line
from pointsman.engine.kernels.layers import ACTIVATIONS
from pointsman.engine.model.fused_layers import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from pointsman.engine.model.linear import JoinedLinear, can_join, join_linear_layers, store_weights
from pointsman.engine.model.self_check import TOLERANCE as LOGITS_TOLERANCE
from pointsman.engine.model.self_check import FirstStep, relative_error

logger = logging.getLogger(__name__)

Builder: TypeAlias = Callable[[], nn.Module]

TOLERANCE = 2e-5
"""Largest allowed difference between the outputs of a part and of its replacement in float32, relative to the largest
number in the row of the output.

In the tested families, the difference is up to 5e-7 for a correct replacement, and at least 0.1 for a wrong one.
"""
SCALED_TOLERANCE = 2e-3
"""Largest allowed difference, as in `TOLERANCE`, for scaled inputs. With attention scores of hundreds, rounding alone
causes 4e-5; a clamp causes far more."""
SCALES = (30.0, 1000.0)
"""Factors by which recorded inputs are scaled, to expose clamps, and activations that differ for large inputs."""
POSITION_OFFSET = 1_000_003
"""Number that is added to the recorded positions, to expose operations that depend on the position."""


# ------------------------------------------------------------------------------------------ what may be replaced


@dataclass(slots=True)
class Part:
    """A module of the model for which `candidates_for` has a likely replacement."""

    parent: nn.Module
    name: str
    module: nn.Module
    options: dict[str, Any] | None
    """Keywords with which an attention module calls the attention function; None: the module is no attention module."""


@dataclass(slots=True)
class Call:
    """The arguments of a recorded call of a module, and the tolerance of its outputs."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    tolerance: float = TOLERANCE
    """Largest allowed difference between the outputs of a part and its replacement for this call."""


def find_parts(model: nn.Module, options: dict[nn.Module, dict[str, Any]], kernels: LayerKernels) -> Iterator[Part]:
    """All parts with a likely replacement, each part before the parts inside it.

    Args:
        options: for each attention module, the keywords with which it calls the attention function.
        kernels: the layer kernels of the replacements.
    """
    for parent in model.modules():
        for name, module in parent.named_children():
            if candidates_for(module, options.get(module), kernels):
                yield Part(parent, name, module, options.get(module))


def candidates_for(module: Any, options: dict[str, Any] | None, kernels: LayerKernels) -> list[Builder]:
    """Builders of possible replacements of a module.

    Args:
        options: the keywords with which the module calls the attention function; None: the module does not call it.
    """
    if is_fused_layer(module):
        norms = module.input_layernorm, module.post_attention_layernorm
        return [partial(FusedLayer, norms[0], module.self_attn, norms[1], module.mlp)]
    if options is not None:
        return attention_candidates(module, options, kernels)
    if all(can_join(getattr(module, one, None)) for one in ("gate_proj", "up_proj", "down_proj")):
        return mlp_candidates(module, kernels)
    epsilon = norm_epsilon(module)
    if epsilon is not None and is_norm(module, kernels):
        return [partial(FusedNorm, module.weight, epsilon, offset, kernels) for offset in (0.0, 1.0)]
    return []


def is_fused_layer(module: nn.Module) -> bool:
    """Whether a module has exactly the four parts of a usual decoder layer (two norms, attention, MLP), all fused
    already."""
    return {name: type(child) for name, child in module.named_children()} == {
        "self_attn": FusedAttention,
        "mlp": FusedMLP,
        "input_layernorm": FusedNorm,
        "post_attention_layernorm": FusedNorm,
    }


def is_norm(module: nn.Module, kernels: LayerKernels) -> bool:
    """Whether a module has the parameters of an RMS norm: one weight vector, and an attribute for epsilon."""
    parameters = list(module.named_parameters())
    return (
        len(parameters) == 1
        and parameters[0][0] == "weight"
        and parameters[0][1].ndim == 1
        and kernels.supports(parameters[0][1])
        and norm_epsilon(module) is not None
    )


def norm_epsilon(module: nn.Module) -> float | None:
    """The number that an RMS norm adds to the mean square, an attribute with one of three usual names; None: there is
    none."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def mlp_candidates(module: Any, kernels: LayerKernels) -> list[Builder]:
    """Builders of a fused gated MLP, one for each activation; empty: the module lacks projection layers with the usual
    names."""
    products = module.gate_proj, module.up_proj, module.down_proj
    return [partial(FusedMLP, *products, kind, kernels) for kind in ACTIVATIONS]


def attention_candidates(module: Any, options: dict[str, Any], kernels: LayerKernels) -> list[Builder]:
    """Builders of fused attention for a module with separate projections of the usual names; empty: none is
    possible."""
    layer: PagedLayer = get_handler(module)
    projections: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    output: Any = getattr(module, "o_proj", None)
    shape = layer.shape
    sizes = [shape.num_heads * shape.k_dim, shape.num_kv_heads * shape.k_dim, shape.num_kv_heads * shape.v_dim]
    if not all(can_join(one) for one in [*projections, output]):
        return []
    if [one.out_features for one in projections] != sizes or len({one.bias is None for one in projections}) > 1:
        return []
    norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    build = partial(FusedAttention, projections, output, layer, attention_options(shape.k_dim, options))
    if all(one is None for one in norms):
        return [partial(build, None, rotary) for rotary in (True, False)]
    if not all(one is not None and is_norm(one, kernels) and len(one.weight) == shape.k_dim for one in norms):
        return []
    query, key = norms
    epsilon = norm_epsilon(query)
    if epsilon is None or epsilon != norm_epsilon(key):
        return []
    return [
        partial(build, HeadNorms(query.weight, key.weight, epsilon, offset), rotary)
        for rotary in (True, False)
        for offset in (0.0, 1.0)
    ]


# ------------------------------------------------------------------------------------------------------ replacing


def fuse(model: nn.Module, step: FirstStep, *, store: bool) -> Counter[str]:
    """Replace all parts that can be replaced, in place. Each replaced part is freed before the next trial, to limit
    peak memory.

    Args:
        model: the model, attached to paged attention with a `FusedAttentionBackend`.
        step: a step that runs the model on a mixed batch.
        store: whether to call `JoinedLinear.store` for the replacements.

    Returns:
        Number of replaced parts of each kind.
    """
    options = _attention_calls(model, step.forward)
    kernels = cast(FusedAttentionBackend, step.context.backend).kernels
    done: Counter[str] = Counter()
    called: WeakSet[nn.Module] = WeakSet()
    for layers in (False, True):  # first parts, then layers that consist of fused parts
        parts = [part for part in find_parts(model, options, kernels) if is_fused_layer(part.module) == layers]
        options.clear()
        calls = _record_calls(model, parts, called, step.forward)
        replaced: set[int] = set()
        found: dict[Hashable, int] = {}
        for part in _pop_in_order(parts):
            call = calls.pop(part.module, None)
            if call is None or id(part.parent) in replaced:
                continue
            with step.use_exact_pool():
                replacement = replacement_for(part, call, kernels, found)
            if replacement is not None:
                replaced.update(id(module) for module in part.module.modules())
                setattr(part.parent, part.name, replacement)
                done[type(replacement).__name__] += 1
                if store:
                    store_weights(replacement)
    if not any(parameter.is_cuda for parameter in model.parameters()) and (joined := join_linear_layers(model, called)):
        done[JoinedLinear.__name__] = joined
        if store:
            store_weights(model)
    logger.debug("fused: %s", ", ".join(f"{count} {kind}" for kind, count in done.items()) or "nothing")
    return done


def drop_tokens_early(model: nn.Module, step: FirstStep) -> bool:
    """Let the last layer compute only the tokens whose logits are needed, if a trial shows that these logits match.

    A chunk of a prompt needs the logits of one token or none. The layer's largest products then skip the other tokens.

    Returns:
        Whether the last layer now computes only these tokens.
    """
    layer = next((module for module in reversed(list(model.modules())) if isinstance(module, FusedLayer)), None)
    if layer is None:
        return False
    expected = step.forward()
    layer.context = step.context
    try:
        right = all(
            _logits_match(step, keep, expected[keep])
            for keep in (torch.tensor([len(expected) - 1, 2]), torch.arange(0))
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # for example, the layer is not the last
        logger.debug("the last layer also computes tokens whose logits are not needed: %s", first_line(error))
        right = False
    finally:
        step.context.keep = None
    if not right:
        layer.context = None
    return right


def _logits_match(step: FirstStep, keep: Tensor, expected: Tensor) -> bool:
    """Whether a step that computes only the tokens of `keep` [r] returns the logits `expected`
    [r, vocab_size]."""
    step.context.keep = keep
    actual = step.forward()
    if actual.shape != expected.shape:
        return False
    return len(keep) == 0 or bool((relative_error(actual, expected) <= LOGITS_TOLERANCE[expected.dtype]).all())


def _pop_in_order(parts: list[Part]) -> Iterator[Part]:
    """The parts in order; each part is removed from the list before the next part, so that its memory can be freed."""
    parts.reverse()
    while parts:
        yield parts.pop()


def _attention_calls(model: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, dict[str, Any]]:
    """The keywords with which each attention module calls the attention function while `run` runs the model."""
    found: dict[nn.Module, dict[str, Any]] = {}
    layers = {module: get_handler(module) for module in model.modules() if isinstance(get_handler(module), PagedLayer)}

    def noting(layer: PagedLayer) -> Callable[..., Tensor]:
        def handler(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
            found[module] = options
            return layer(module, query, key, value, options)

        return handler

    try:
        for module, layer in layers.items():
            set_handler(module, noting(layer))
        run()
    finally:
        for module, layer in layers.items():
            set_handler(module, layer)
    return found


def _record_calls(
    model: nn.Module, parts: Iterable[Part], called: WeakSet[nn.Module], run: Callable[[], Any]
) -> dict[nn.Module, Call]:
    """Run the model once and record the first call of each part. Linear layers that are called are added to
    `called`."""
    calls: dict[nn.Module, Call] = {}

    def note_linear(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        called.add(module)

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module not in calls:  # copies, because models change tensors in place
            calls[module] = Call(map_tensors(arguments, Tensor.clone), map_tensors(keywords, Tensor.clone))

    hooks = [part.module.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    hooks += [module.register_forward_hook(note_linear) for module in model.modules() if can_join(module)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with `change` applied to every tensor in it, including tensors in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(one, change) for one in value)
    if type(value) is dict:
        return {name: map_tensors(one, change) for name, one in value.items()}
    return value


# --------------------------------------------------------------------------------------------------------- trying


def replacement_for(
    part: Part, call: Call, kernels: LayerKernels, found: MutableMapping[Hashable, int]
) -> nn.Module | None:
    """The first replacement whose outputs match the outputs of the part for all inputs; None: no replacement
    matches.

    Args:
        found: for each kind of part, the index of the candidate that replaced the first such part. A later part of the
            kind tries this candidate first, with its recorded call alone; the first part tried the variations.
    """
    module, kind = part.module, kind_of(part)
    with torch.inference_mode():
        if is_fused_layer(module):  # the layer's parts stay the same, so there is no new rounding
            exact, inputs = module, [call]
        else:
            try:
                exact = float32_copy(module)
                inputs = list(variations(Call(*map_tensors((call.arguments, call.keywords), _as_float32))))
            except Exception as error:  # the part may contain any code, and can stay unchanged
                logger.debug("%s is not replaced: %s: %s", part.name, type(error).__name__, error)
                return None
        builders = candidates_for(exact, part.options, kernels)
        trials = [(index, inputs) for index in range(len(builders))]
        if found.get(kind, len(builders)) < len(builders):
            trials.insert(0, (found[kind], inputs[:1]))
        for index, calls in trials:
            if (replacement := _matching_replacement(builders[index], exact, calls)) is not None:
                found.setdefault(kind, index)
                return replacement if exact is module else candidates_for(module, part.options, kernels)[index]()
    return None


def kind_of(part: Part) -> Hashable:
    """Equal for parts of the same class with the same settings and shapes, such as the MLPs of a model's layers. The
    settings are the module's own numbers, words and flags, without the index of its layer."""
    values = vars(part.module).items()
    settings = tuple((name, one) for name, one in values if isinstance(one, (bool, int, float, str)))
    shapes = tuple((name, tuple(one.shape)) for name, one in part.module.named_parameters())
    return type(part.module), tuple(one for one in settings if one[0] != "layer_idx"), shapes


def _matching_replacement(build: Builder, exact: nn.Module, inputs: list[Call]) -> nn.Module | None:
    """The module that `build` makes, if its outputs match those of `exact`; None: they differ, or a module raises."""
    try:
        replacement = build()
        return replacement if outputs_match(exact, replacement, inputs) else None
    except Exception as error:
        logger.debug("%s is not replaced: %s: %s", type(exact).__name__, type(error).__name__, error)
        return None


def float32_copy(module: nn.Module) -> nn.Module:
    """The module in float32: the module itself if all its parameters are float32, otherwise a copy with the same
    handler."""
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return module
    handler = get_handler(module)
    set_handler(module, None)
    try:
        duplicate = copy.deepcopy(module).float()
    finally:
        set_handler(module, handler)
    set_handler(duplicate, handler)
    return duplicate


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def variations(call: Call) -> Iterator[Call]:
    """The recorded call, and calls with much larger inputs, another mean, and much later positions.

    Rotary angles stay as recorded. So later positions change the output of a part only if the part uses positions in
    another way, for example to scale its queries.
    """
    yield call
    for scale in SCALES:
        yield _with_changed_input(call, partial(_scaled, scale), SCALED_TOLERANCE)
    yield _with_changed_input(call, lambda x: x + 3 * x.std(), TOLERANCE)
    if any(_is_position(value) for value in call.keywords.values()):
        moved = {
            name: value + POSITION_OFFSET if _is_position(value) else value for name, value in call.keywords.items()
        }
        yield Call(call.arguments, moved)


def _scaled(scale: float, x: Tensor) -> Tensor:
    return x * scale


def _is_position(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _with_changed_input(call: Call, change: Callable[[Tensor], Tensor], tolerance: float) -> Call:
    """The call with `change` applied to its hidden states: the first argument, or the keyword `hidden_states`."""
    if call.arguments:
        return Call((change(call.arguments[0]), *call.arguments[1:]), call.keywords, tolerance)
    return Call((), {**call.keywords, "hidden_states": change(call.keywords["hidden_states"])}, tolerance)


def outputs_match(part: nn.Module, replacement: nn.Module, calls: Iterable[Call]) -> bool:
    """Whether a part and its replacement return the same outputs for all calls, up to rounding."""
    for call in calls:
        # Each module gets its own copy of the inputs, because a module may change tensors in place.
        expected, actual = (
            one(*map_tensors(call.arguments, Tensor.clone), **map_tensors(call.keywords, Tensor.clone))
            for one in (part, replacement)
        )
        if isinstance(expected, tuple) != isinstance(actual, tuple):
            return False
        if isinstance(expected, tuple):
            expected, actual = expected[0], actual[0]
        if not is_close(actual, expected, call.tolerance):
            return False
    return True


def is_close(actual: Any, expected: Any, tolerance: float) -> bool:
    """Whether the outputs `actual` and `expected` [..., width] are equal in every row, up to the relative error
    `tolerance`."""
    if (
        not (isinstance(actual, Tensor) and isinstance(expected, Tensor))
        or actual.shape != expected.shape
        or actual.dtype != expected.dtype
    ):
        return False
    error = (actual.float() - expected.float()).abs().amax(dim=-1)
    largest = expected.float().abs().amax(dim=-1).clamp(min=1e-6)
    return bool((error / largest).max() <= tolerance)
