"""Collects the drop-in's assumptions about vLLM, and checks them against vLLM's sources.

Guarded uses are no assumptions: imports in `try` with `except ImportError`, and attributes that a function tests with
`hasattr`, or reads with `getattr` and a default. A guarded use of a missing name is noted as a fallback.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from pointsman.integrations.vllm.interface.sources import (
    Arguments,
    Class,
    External,
    Function,
    Module,
    Signature,
    Sources,
    is_for_types,
)
from pointsman.integrations.vllm.interface.types import (
    UNKNOWN,
    Attributes,
    Bound,
    Instance,
    Maker,
    Option,
    Scope,
    Type,
    Types,
    instance_classes,
)

VLLM = "vllm"
_CATCHES_IMPORT = {"ImportError", "ModuleNotFoundError"}


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption of the drop-in about vLLM."""

    kind: str
    """Kind of the assumption: "name", "attribute", "call", "field", "override" or "scheduler"."""
    place: str
    """File and line of the code that makes the assumption."""
    expected: str
    holds: bool | None
    """Whether the assumption holds; None: unknown."""
    found: str = ""
    """What vLLM has instead, if the assumption does not hold or is unknown."""


class Reader:
    """Collects the assumptions in modules of the drop-in.

    Args:
        sources: sources of the drop-in and of vLLM.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.types = Types(sources)
        self.assumptions: dict[tuple[str, str, str], Assumption] = {}
        self.fallbacks: list[Assumption] = []
        """Assumptions that do not hold, and whose uses are guarded."""
        self.made: dict[Class, set[str]] = {}
        """Classes of vLLM's that a `maker` constructs, each with the fields that our code sets or leaves out on
        purpose."""
        self.made_at: dict[Class, str] = {}
        """File and line of the `maker` call of each class."""
        self._module: Module
        self._learns = False
        self._guarded: set[tuple[str, str]] = set()
        self._ours: set[str] = set()  # private attribute names that our code sets on vLLM's objects
        self._may_fail = False  # within a `try` that catches a failing import
        self._has_failed = False  # an import in that `try` has failed

    def read(self, modules: list[Module]) -> None:
        """Read the modules twice: first to learn the types of attributes, which the code of other modules needs, then
        to collect the assumptions.
        """
        for self._learns in (True, False):
            self.types.forget_types()
            for module in modules:
                self._read(module)

    def _read(self, module: Module) -> None:
        self._module = module
        scope = Scope(module)
        for node in module.tree.body:
            self._visit(node, scope)

    # ------------------------------------------------------------------ what is noted

    def _note(self, kind: str, node: ast.AST, expected: str, holds: bool | None, found: str = "") -> None:
        if self._learns:
            return
        place = f"{self._module.path.name}:{getattr(node, 'lineno', 0)}"
        self.assumptions.setdefault((kind, place, expected), Assumption(kind, place, expected, holds, found))

    def _note_fallback(self, kind: str, node: ast.AST, expected: str, instead: str) -> None:
        if not self._learns:
            place = f"{self._module.path.name}:{getattr(node, 'lineno', 0)}"
            self.fallbacks.append(Assumption(kind, place, expected, False, instead))

    def _note_import(self, node: ast.AST, module: str, name: str | None, *, at_runtime: bool) -> None:
        if module.partition(".")[0] != VLLM:
            return
        expected = module if name is None else f"{module}.{name}"
        target = self._sources.module(module)
        found = f"no module {module}" if target is None else ""
        holds: bool | None = target is not None
        if isinstance(target, Module) and name is not None:
            what = self._sources.find(target, name, at_runtime=at_runtime)
            holds = None if isinstance(what, External) and what.name.startswith(VLLM) else what is not None
            found = "" if holds else f"{module} has no {name}"
            if holds is False and not at_runtime:
                found += ", which only annotations name: our code's uses of it were not compared"
        elif isinstance(target, External):
            holds = None
        if holds is None:
            found = f"{module} cannot be read"
        if self._may_fail and holds is False:
            self._has_failed = True
            self._note_fallback("name", node, expected, "the import is caught")
        elif not self._may_fail:
            self._note("name", node, expected, holds, found)

    def _note_attribute(self, node: ast.AST, kind: Type, name: str, *, is_set: bool = False) -> None:
        """Keep the assumption that an object has an attribute, which our code reads or sets. It is enough if one of
        several possible types has the attribute."""
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), name) in self._guarded:
            return
        theirs: list[Class] = []
        answers: list[bool | None] = []
        for option in kind:
            if isinstance(option, Module):
                self._note_import(node, option.name, name, at_runtime=True)
                return
            of, has = self._class_with_attribute(option, name)
            answers.append(has)
            if of is not None:
                theirs.append(of)
        if not theirs:
            return
        if is_set:
            for each in theirs:
                self.made.get(each, set()).add(name)
        holds = True if True in answers else None if None in answers else False
        found = ""
        if holds is None:
            found = "the type of the object, or a base of its class, is not known"
        elif not holds:
            found = "; ".join(f"{each.name} has {_list_similar(name, each.member_names())}" for each in theirs)
        self._note("attribute", node, f"{theirs[0].name}.{name}", holds, found)

    def _class_with_attribute(self, option: Option, name: str) -> tuple[Class | None, bool | None]:
        """The class of vLLM's whose attribute is used, and whether it has the attribute."""
        kind = option.kind if isinstance(option, Instance) else option
        if not isinstance(kind, Class):
            return None, None
        if kind.member(name) is None:
            kind = self.types.mixed_into.get(kind, kind)
        if not _is_of_vllm(kind):
            return None, True if kind.member(name) is not None else None
        return kind, (isinstance(option, Class) and name in dir(type)) or kind.has_attribute(name)

    def _note_call(self, node: ast.Call, scope: Scope) -> None:
        given = Arguments.of(node)
        function: ast.expr = node.func
        if isinstance(function, ast.Name) and function.id == "map" and node.args:
            function, given = node.args[0], Arguments(len(node.args) - 1, frozenset())
        options = self.types.infer(function, scope)
        makers = [
            (option.kind, self._as_keywords(node, option, given)) for option in options if isinstance(option, Maker)
        ]
        if makers:  # our code has several makers of the class, and each version of vLLM fits one of them
            fits = [
                each for each in makers if each[0].constructor is None or not each[0].constructor.call_problem(each[1])
            ]
            self._note_construction(node, *(fits or makers)[0])
        for option in options:
            if isinstance(option, Class):
                self._note_construction(node, option, given)
            elif isinstance(option, Bound) and option.function.module.name.partition(".")[0] == VLLM:
                function_node = option.function.node
                name = option.function.name
                self._check(node, name, Signature.of(function_node, bound=option.is_bound), given)

    def _as_keywords(self, node: ast.Call, maker: Maker, given: Arguments) -> Arguments:
        """The arguments of a call of a maker's result, with the positional arguments converted to keyword arguments."""
        names = frozenset(maker.fields[: given.num_positional]) | given.keywords | maker.given
        lacking = names & maker.optional - maker.kind.fields.keys()
        for name in sorted(lacking):
            self._note_fallback("field", node, f"{maker.kind.name}.{name}", "it is not given")
        return Arguments(0, names - lacking)

    def _note_construction(self, node: ast.Call, kind: Class, given: Arguments) -> None:
        """Keep the assumption that a class can be constructed with these arguments, as our code does."""
        if not _is_of_vllm(kind):
            return
        if kind in self.made:
            self.made[kind] |= given.keywords
        signature = kind.constructor
        if signature is None:
            self._note("call", node, f"{kind.name}({given})", None)
        else:
            self._check(node, kind.name, signature, given)

    def _check(self, node: ast.AST, name: str, signature: Signature, given: Arguments) -> None:
        problem = signature.call_problem(given)
        self._note(
            "call",
            node,
            f"{name}({given})",
            problem is None,
            f"{problem}{signature_hint(signature)}" if problem else "",
        )

    def _note_maker(self, node: ast.Call, scope: Scope) -> None:
        for option in self.types.infer(node, scope):
            if not isinstance(option, Maker) or not _is_of_vllm(option.kind):
                continue
            kind = option.kind
            self.made.setdefault(kind, set()).update(option.left)
            self.made_at[kind] = f"{self._module.path.name}:{node.lineno}"
            for name in option.fields:
                if name not in option.optional:
                    self._note_field(node, kind, name)

    def _note_replace_fields(self, node: ast.Call, scope: Scope) -> None:
        for kind in filter(_is_of_vllm, instance_classes(self.types.infer(node.args[0], scope))):
            for name in filter(None, (each.arg for each in node.keywords)):
                self._note_field(node, kind, name)

    def _note_field(self, node: ast.Call, kind: Class, name: str) -> None:
        is_there = name in kind.fields
        found = "" if is_there else f"{kind.name} has {_list_similar(name, set(kind.fields))}"
        self._note("field", node, f"{kind.name}.{name}", is_there, found)

    def _note_overrides(self, node: ast.ClassDef, kind: Class, base: Class) -> None:
        """Keep the assumptions about the public members of our class `kind`, which precedes vLLM's class `base` in the
        order of attribute lookup: they override the members of `base`."""
        for name, member in kind.own_members.items():
            is_declared = isinstance(member.node, ast.AnnAssign) and member.node.value is None
            if member.owner is not kind or (name.startswith("_") and not is_declared):
                continue
            expected = f"{base.name}.{name}"
            has = base.has_attribute(name)
            theirs = base.member(name)
            if not has or theirs is None:
                found = "" if has is None else f"{base.name} has {_list_similar(name, base.member_names())}"
                self._note("override", member.node, expected, has, found)
                continue
            problem = None
            if member.function is not None and theirs.function is not None and not theirs.is_property:
                problem = override_problem(member.function, theirs.function, with_defaults=True)
            self._note("override", member.node, expected, problem is None, problem or "")

    def _learn_attribute_types(self, node: ast.Call, scope: Scope) -> None:
        """Learn the types of attributes of our own classes from the arguments with which these classes are
        constructed."""
        for option in self.types.infer(node.func, scope):
            if not isinstance(option, Class) or _is_of_vllm(option):
                continue
            for each in node.keywords:
                if each.arg is not None:
                    kind = self.types.infer(each.value, scope)
                    if any(isinstance(of, Instance) and _is_of_vllm(of.kind) for of in kind):
                        self.types.carried.setdefault((option, each.arg), kind)

    # ------------------------------------------------------------------ the walk

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._visit_import(node, at_runtime=True)
        elif isinstance(node, ast.If) and is_for_types(node):
            for each in node.body:
                if isinstance(each, ast.Import | ast.ImportFrom):
                    self._visit_import(each, at_runtime=False)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._visit_function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._visit_class(node, scope)
        elif isinstance(node, ast.Lambda):
            self._visit(node.body, scope.child_scope({each.arg: (UNKNOWN,) for each in node.args.args}))
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            self._visit_comprehension(node, scope)
        elif isinstance(node, ast.If | ast.IfExp):
            self._visit_branches(node, scope)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:
                self._visit(value, scope)
                scope = self.types.narrowed_scope(value, scope)
        elif isinstance(node, ast.Try):
            self._visit_try(node, scope)
        elif isinstance(node, ast.AnnAssign):
            self._visit_all([node.target, *([node.value] if node.value is not None else [])], scope)
        else:
            self._visit_all(ast.iter_child_nodes(node), scope)
            self._note_expression(node, scope)

    def _visit_all(self, nodes: Iterable[ast.AST], scope: Scope) -> None:
        for node in nodes:
            self._visit(node, scope)

    def _visit_try(self, node: ast.Try, scope: Scope) -> None:
        """Visit a `try` statement. If it catches a failing import, visit only the branch that runs with this version of
        vLLM."""
        if not {name for each in node.handlers for name in _names(each.type)} & _CATCHES_IMPORT:
            self._visit_all([*node.body, *node.handlers, *node.orelse, *node.finalbody], scope)
            return
        before, self._may_fail, self._has_failed = self._may_fail, True, False
        self._visit_all(node.body, scope)
        self._may_fail = before
        self._visit_all(node.handlers if self._has_failed else node.orelse, scope)
        self._visit_all(node.finalbody, scope)

    def _visit_import(self, node: ast.Import | ast.ImportFrom, *, at_runtime: bool) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                self._note_import(node, alias.name, None, at_runtime=at_runtime)
            else:
                self._note_import(node, self._module.absolute_name(node), alias.name, at_runtime=at_runtime)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        own = isinstance(scope.owner, Class) and node in scope.owner.node.body
        inner = self.types.function_scope(node, self._module, scope.owner if own else None, scope)
        before = self._guarded
        self._guarded = before | set(self._guarded_attributes(node, inner))
        self._visit_all(node.body, inner)
        self._guarded = before

    def _guarded_attributes(self, node: ast.AST, scope: Scope) -> Iterator[tuple[str, str]]:
        """The attributes that a function tests with `hasattr`, or reads with `getattr` and a default, as (object,
        attribute).
        """
        for each in ast.walk(node):
            if not (isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and len(each.args) >= 2):
                continue
            if each.func.id == "hasattr" or (each.func.id == "getattr" and len(each.args) == 3):
                name = each.args[1]
                if isinstance(name, ast.Constant):
                    yield ast.unparse(each.args[0]), str(name.value)

    def _visit_class(self, node: ast.ClassDef, scope: Scope) -> None:
        is_inner = scope.parent is not None or bool(scope.names)
        kind = self.types.local_class(node, scope) if is_inner else self._sources.class_of(self._module, node)
        for base in kind.bases:
            if isinstance(base, Class) and _is_of_vllm(base):
                self._note_overrides(node, kind, base)
        self._visit_all(node.body, Scope(self._module, scope if is_inner else None, kind))

    def _visit_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
    ) -> None:
        for each in node.generators:
            self._visit(each.iter, scope)
            bound = self.types.comprehension_scope([ast.comprehension(each.target, each.iter, [], 0)], scope)
            for test in each.ifs:
                self._visit(test, bound)
                bound = self.types.narrowed_scope(test, bound)
            scope = bound
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._visit_all(parts, scope)

    def _visit_branches(self, node: ast.If | ast.IfExp, scope: Scope) -> None:
        self._visit(node.test, scope)
        inner = self.types.narrowed_scope(node.test, scope)
        self._visit_all(node.body if isinstance(node, ast.If) else [node.body], inner)
        self._visit_all(node.orelse if isinstance(node, ast.If) else [node.orelse], scope)

    def _note_expression(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Attribute):
            self._note_attribute(
                node, self.types.infer(node.value, scope), node.attr, is_set=isinstance(node.ctx, ast.Store)
            )
        elif isinstance(node, ast.Subscript):
            self._note_variable(node, scope)
        elif isinstance(node, ast.Call):
            self._visit_call(node, scope)

    def _note_variable(self, node: ast.Subscript, scope: Scope) -> None:
        """Keep the assumption that x has the attribute that `vars(x)["name"]` reads or sets. Private names that our
        code sets are no assumptions."""
        if not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, str):
            return
        name = node.slice.value
        for option in self.types.infer(node.value, scope):
            if isinstance(option, Attributes):
                if isinstance(node.ctx, ast.Store) and name.startswith("_"):
                    self._ours.add(name)
                elif name not in self._ours:
                    self._note_attribute(node, option.of, name)

    def _visit_call(self, node: ast.Call, scope: Scope) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if self._learns:
            self._learn_attribute_types(node, scope)
        if name == "maker":
            self._note_maker(node, scope)
        elif name == "replace" and node.args:
            self._note_replace_fields(node, scope)
        elif name == "getattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            asked = str(node.args[1].value)
            for kind in instance_classes(self.types.infer(node.args[0], scope)):
                if _is_of_vllm(kind) and kind.has_attribute(asked) is False:
                    self._note_fallback("attribute", node, f"{kind.name}.{asked}", "its default is used")
        elif name == "type" and len(node.args) == 3:
            self._note_mixin(node, scope)
        else:
            self._note_call(node, scope)

    def _note_mixin(self, node: ast.Call, scope: Scope) -> None:
        """Keep the assumptions of `type(name, (ours, theirs), ...)`: our class precedes vLLM's class in the
        bases, and overrides its members."""
        bases = node.args[1]
        if not isinstance(bases, ast.Tuple):
            return
        kinds = [option for base in bases.elts for option in self.types.infer(base, scope) if isinstance(option, Class)]
        theirs = [kind for kind in kinds if _is_of_vllm(kind)]
        for kind in kinds:
            if kind not in theirs and theirs:
                self.types.mixed_into[kind] = theirs[0]
                self._note_overrides(kind.node, kind, theirs[0])


def _is_of_vllm(kind: Class) -> bool:
    return kind.module.name.partition(".")[0] == VLLM


def _names(node: ast.expr | None) -> Iterator[str]:
    """The names of exceptions that a handler catches."""
    if node is not None:
        yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _list_similar(name: str, names: set[str]) -> str:
    """Text that lists the elements of `names` that are most similar to `name`."""
    return ", ".join(get_close_matches(name, sorted(names), n=3, cutoff=0.6)) or "nothing like it"


def override_problem(ours: Function, theirs: Function, *, with_defaults: bool) -> str | None:
    """Why our method cannot be called with the arguments of vLLM's method; None: it can be called with them.

    Args:
        with_defaults: whether the call also passes the arguments that have defaults in vLLM.
    """
    signature = Signature.of(ours.node, bound=True)
    wanted = Signature.of(theirs.node, bound="staticmethod" not in theirs.decorators)
    asked = [each for each in wanted.parameters if with_defaults or not each.has_default]
    by_place = [each for each in asked if not each.is_keyword_only]
    named = frozenset(each.name for each in asked if not each.is_positional_only)
    problem = signature.call_problem(Arguments(0, named)) or signature.call_problem(
        Arguments(len(by_place), frozenset(each.name for each in asked if each.is_keyword_only))
    )
    return f"{problem}{signature_hint(wanted)}" if problem else None


def signature_hint(signature: Signature) -> str:
    """The end of an error text: the arguments that a method or class accepts in this vLLM; "": the text is too long."""
    shown = str(signature)
    return f"; vLLM has {shown}" if len(shown) <= 120 else ""
