"""Bodies of requests: limits the size of one body and of all bodies together, and parses JSON strictly.

    BodyLimitMiddleware   at most `max_bytes` of one body, and a budget by tenant for all bodies that are held at once
    StrictRequest.json    counts strings, lists and objects before it parses them; refuses prompts that are longer than
                          the model's length
    StrictRoute           a route that accepts JSON, and releases the body's bytes once it is parsed

JSON is parsed by pydantic, not by Python: it refuses NaN and infinities, lone surrogates, nesting beyond 200 levels and
integers of thousands of digits, all with an error that names the place. Parsing blocks the event loop. Numbers cost
little (4 MiB of them 0.05 s). Strings, lists and objects cost ten times as much, so their number is limited.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pointsman.server.wire.errors import ApiError, one_line, shown
from pointsman.server.wire.protocol import MAX_PROMPTS

if TYPE_CHECKING:
    from pointsman.server.stages import StageLimit

logger = logging.getLogger(__name__)

HELD_BODY, MAX_PROMPT_TOKENS = "pointsman.body", "pointsman.max_prompt_tokens"
"""Keys in a request's ASGI scope."""
PROMPT_FIELDS = ("prompt", "input")
"""Fields of a body that may hold prompts of token ids."""
MAX_TEXTS = 100_000
"""Maximum number of strings in a body, including names of fields."""
MAX_CONTAINERS = 100_000
"""Maximum number of lists and objects in a body."""
FREE_BYTES = 64 * 1024
"""Number of first bytes of each body that the budget does not count, so that incomplete large bodies do not block usual
requests."""
TRIM_BYTES = 16 * 1024 * 1024
"""Number of released bytes after which free memory is returned to the system."""
TRIM_SECONDS = 0.5
"""Seconds from the release of a body's bytes to the return of free memory to the system. Objects that refer to the
bytes are freed meanwhile."""


# ------------------------------------------------------------------------------------------------- size


class BodyBudget:
    """Counts and limits the bytes of all bodies that are arriving or not parsed yet.

    Args:
        limit: the limit of the stage `BODIES`.
    """

    def __init__(self, limit: StageLimit) -> None:
        self._limit = limit
        self._since_trim = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes that all bodies hold now."""
        return self._limit.total

    def take(self, tenant: str, num_bytes: int, num_counted: int) -> None:
        """Count `num_bytes` further bytes of one body of a tenant; `num_counted`: number of this body's bytes that
        are already counted.

        Raises:
            ApiError: 429, the budget is exhausted; the bytes are not counted.
        """
        try:
            self._limit.take(tenant, num_bytes, held_for_request=num_counted)
        except ApiError as error:
            assert error.headers is not None
            error.headers = {**error.headers, "connection": "close"}  # otherwise the rest of the body is read
            raise

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Release bytes of a tenant's bodies."""
        self._limit.give_back(tenant, num_bytes)
        self._since_trim += num_bytes
        if self._since_trim >= TRIM_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim_unless_held)

    def _trim_unless_held(self) -> None:
        """Return free memory to the system. If bodies hold `TRIM_BYTES` again, do nothing; the next release tries
        again."""
        self._timer = None
        if self.num_bytes < TRIM_BYTES:
            self._since_trim = 0
            _trim()


class HeldBody:
    """The bytes of one request's body that count in the budget: all but the body's first `FREE_BYTES`.

    Args:
        budget: the budget of all bodies.
        tenant: the request's tenant, as far as it is known before the body is read.
    """

    def __init__(self, budget: BodyBudget, tenant: Callable[[], str]) -> None:
        self._budget = budget
        self._find_tenant = tenant
        self._tenant = ""
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes of the body that have arrived.

        Raises:
            ApiError: 429, the budget is exhausted.
        """
        taken = max(0, self.num_bytes - FREE_BYTES)
        more = max(0, self.num_bytes + num_bytes - FREE_BYTES) - taken
        if more:
            if not taken:
                self._tenant = self._find_tenant()
            self._budget.take(self._tenant, more, taken)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Release the bytes of the body; a second call does nothing."""
        if self.num_bytes > FREE_BYTES:
            self._budget.give_back(self._tenant, self.num_bytes - FREE_BYTES)
        self.num_bytes = 0


def _trim() -> None:
    """Return free memory to the system, if the C library can: by default it keeps free memory between used blocks."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        logger.debug("this system's C library gives no memory back")


class BodyLimitMiddleware:
    """Reads at most `max_bytes` of a body, with or without a Content-Length. Refuses bodies when the budget of all
    bodies is exhausted.

    Args:
        app: the app behind this middleware.
        max_bytes: maximum size of a body.
        max_prompt_tokens: maximum number of tokens of one prompt.
        budget: the budget of all bodies.
        tenant_of: returns the tenant of a request with the given scope.
        answer: makes the response to an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_prompt_tokens: int,
        budget: BodyBudget,
        tenant_of: Callable[[Scope], str],
        answer: Callable[[HTTPException], Response],
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_prompt_tokens = max_prompt_tokens
        self._budget = budget
        self._tenant_of = tenant_of
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if given.isdigit() and int(given[:20]) > self._max_bytes:
            await self._answer(self._size_error())(scope, receive, send)
            return
        held = HeldBody(self._budget, partial(self._tenant_of, scope))

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request" and (body := message.get("body")):
                if held.num_bytes + len(body) > self._max_bytes:
                    raise self._size_error()  # raised where the app reads the body; the app sends the response
                held.add(len(body))
            return message

        scope[HELD_BODY], scope[MAX_PROMPT_TOKENS] = held, self._max_prompt_tokens
        try:
            await self._app(scope, counted, send)
        finally:
            held.release()

    def _size_error(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes} bytes, the maximum of this server; send less",
            headers={"connection": "close"},  # otherwise the rest of the body would still be read
        )


# ------------------------------------------------------------------------------------------------- JSON


def check_numbers(body: bytes) -> None:
    """Refuse JSON with too many strings, lists or objects, as parsing would take long to create them.

    Raises:
        ApiError: 400, with the number of strings, or of lists and objects, and the limit.
    """
    if body.count(b'"') > 2 * MAX_TEXTS:
        num_texts = _without_escapes(body).count(b'"') // 2
        if num_texts > MAX_TEXTS:
            raise _count_error(num_texts, "texts, names of fields among them", MAX_TEXTS)
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        outside = b"".join(_without_escapes(body).split(b'"')[::2])
        num_containers = outside.count(b"[") + outside.count(b"{")
        if num_containers > MAX_CONTAINERS:
            raise _count_error(num_containers, "lists and objects", MAX_CONTAINERS)


def check_prompt_lengths(body: Any, limit: int | None) -> None:
    """Refuse prompts with more token ids than the model's maximum length. Called before each token id is validated, as
    a prompt may have a million ids.

    Args:
        body: parsed JSON.
        limit: maximum number of token ids of one prompt; None: no limit.

    Raises:
        ApiError: 400, with the length and the limit.
    """
    if limit is None or not isinstance(body, dict):
        return
    for name in PROMPT_FIELDS:
        prompt = body.get(name)
        if not isinstance(prompt, list):
            continue
        longest = max((len(part) for part in prompt[:MAX_PROMPTS] if isinstance(part, list)), default=0)
        if prompt and isinstance(prompt[0], int):
            longest = len(prompt)
        if longest > limit:
            raise ApiError(
                400,
                f"{name}: a prompt has {longest} token ids, and max_model_len is {limit}; shorten the prompt",
                param=name,
            )


def _without_escapes(body: bytes) -> bytes:
    """JSON without escaped backslashes and quotation marks: each remaining quotation mark begins or ends a string."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _count_error(number: int, elements: str, limit: int) -> ApiError:
    return ApiError(400, f"the body has {number} {elements}, and at most {limit} are read; send less in one request")


class StrictRequest(Request):
    """A request that refuses invalid JSON, NaN and infinity, and bodies with too many texts, lists or token ids."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            check_numbers(body)
            # A hundred thousand small lists would trigger the garbage collector many times.
            gc.disable()
            try:
                self._json = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"the body is not valid JSON: {one_line(str(error))}") from None
            finally:
                gc.enable()
            check_prompt_lengths(self._json, self.scope.get(MAX_PROMPT_TOKENS))
        return self._json


class StrictRoute(APIRoute):
    """A route whose body, if it has one, must be application/json.

    If a request has none of the headers that the route declares, the route validates the body and calls the endpoint
    itself, without FastAPI's general handler. That saves 11 to 15 % of the CPU that a streamed request of 32 tokens
    takes in this process.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body = self.body_field is not None
        call_directly = self._direct_call()

        async def strict(request: Request) -> Response:
            if has_body:
                given = request.headers.get("content-type", "")
                if given.partition(";")[0].strip().lower() != "application/json":
                    raise ApiError(400, f"the content type is {shown(given)}; send application/json")
            own = StrictRequest(request.scope, request.receive)
            try:
                response = None if call_directly is None else await call_directly(own)
                if response is None:
                    response = await handle(own)
            except ClientDisconnect:  # the client disconnected while it sent its body; no response can be read
                return Response(status_code=400)
            held = request.scope.get(HELD_BODY)
            if held is not None:
                held.release()  # the response may take long, and needs only the parsed body
            return response

        return strict

    def _direct_call(self) -> Callable[[StrictRequest], Coroutine[Any, Any, Response | None]] | None:
        """Returns a function that calls the endpoint with a request, or returns None if FastAPI must handle the
        request. Returns None in place of the function if FastAPI must handle all requests of this route."""
        wanted, endpoint = self.dependant, self.endpoint
        if len(wanted.body_params) != 1 or self._embed_body_fields or wanted.dependencies:
            return None
        name, model = wanted.body_params[0].name, wanted.body_params[0].field_info.annotation
        headers = {param.alias.lower().encode() for param in wanted.header_params}
        absent = {param.name: param.default for param in wanted.header_params}
        is_simple = iscoroutinefunction(endpoint) and {name, *absent} == set(signature(endpoint).parameters)
        if not (is_simple and isinstance(model, type) and issubclass(model, BaseModel)):
            return None

        async def call(request: StrictRequest) -> Response | None:
            if not headers.isdisjoint([header for header, _ in request.scope["headers"]]) or not await request.body():
                return None
            try:
                body = model.model_validate(await request.json(), from_attributes=True)
            except ValidationError as error:  # raised in FastAPI's form
                found = error.errors(include_url=False)
                raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None
            response: Response = await endpoint(**{name: body}, **absent)
            return response

        return call
