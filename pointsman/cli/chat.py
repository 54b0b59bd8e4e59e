"""`pointsman chat`: a conversation with a running server, in the terminal or through a pipe.

The output is shown as it is generated. On a terminal Ctrl-C stops a completion (the server aborts the request, because
its client disconnects), and the conversation continues; Ctrl-D ends it. From a pipe every line is a message, and every
completion ends with a line break. A failed turn is reported on stderr and is not added to the history.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx2

from pointsman.cli.display import one_line, printable
from pointsman.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, CommandError
from pointsman.cli.server_client import DEFAULT_URL, LOOPBACK, key_headers, server_url

PROMPT = "> "
TIMEOUT = httpx2.Timeout(600.0, connect=10.0)
"""Timeouts in seconds. The read timeout is long, because a request may wait in the queue before its first token; Ctrl-C
stops the wait."""
ENDS = {
    "length": "the completion reached its maximum number of tokens",
    "deadline": "the server's deadline has passed",
    "abort": "the server ended the request",
}
"""Texts for the finish reasons that are shown."""


class TurnError(Exception):
    """Raised if the server gives no complete completion for a message.

    Args:
        message: one line.
        exit_code: 2 if the message, the API key or the model's name is wrong, 1 if the server failed.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_chat(
    url: str,
    *,
    model: str | None,
    api_key: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
) -> int:
    """Read messages from standard input and show the completions, until the input ends.

    Returns:
        The exit code: 0; from a pipe also 2 if the server refused a message and 1 if it failed while completing a
        message.

    Raises:
        CommandError: the server cannot be reached, refuses the key, or does not have the model.
    """
    sampling = {"temperature": temperature, "max_completion_tokens": max_tokens}
    with _make_client(url, api_key) as client:
        try:
            model = choose_model(client, model)
        except TurnError as error:
            raise CommandError(str(error), error.exit_code) from None
        parameters = {"model": model} | {name: value for name, value in sampling.items() if value is not None}
        chat = Chat(client, parameters, system)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # bytes that are not text become replacement characters
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _run_conversation(chat)
        return _send_each_line(chat)


class Chat:
    """A conversation with a server: keeps the history, and sends one message at a time.

    Args:
        client: a client with the server's address.
        parameters: fields of every request: the model and its sampling parameters.
        system: the first message, if any.
    """

    def __init__(self, client: httpx2.Client, parameters: dict[str, Any], system: str | None = None) -> None:
        self.messages = [_make_message("system", system)] if system else []
        self.end: str | None = None
        """The server's finish reason of the last completion; None: this client stopped the completion."""
        self._client = client
        self._parameters = parameters

    def ask(self, question: str) -> Generator[str]:
        """The pieces of the completion, as they arrive.

        The turn is added to the history when the generator ends. If the generator is closed early, the turn has the
        pieces read so far.

        Raises:
            TurnError: there is no completion, or the completion was cut off; the history is unchanged.
        """
        messages = [*self.messages, _make_message("user", question)]
        pieces: list[str] = []
        failed = True
        self.end = None
        try:
            for piece in self._complete(messages):
                pieces.append(piece)
                yield piece
            failed = False
        except (GeneratorExit, KeyboardInterrupt):
            failed = not pieces
            raise
        finally:
            if not failed:
                self.messages = [*messages, _make_message("assistant", "".join(pieces))]

    def _complete(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {**self._parameters, "messages": messages, "stream": True}
        done = False
        with _connection_errors(), self._client.sse("/v1/chat/completions", method="POST", json=body) as source:
            _check_status(source.response)
            for event in source:
                if event.data == "[DONE]":
                    done = True
                elif event.data and not done:
                    yield from self._read_event(event.data)
        if not done:
            raise TurnError("the connection ended before the completion; see the server's log")

    def _read_event(self, data: str) -> Iterator[str]:
        """Yield the texts in a server-sent event, if there are any."""
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise TurnError(f"the server stopped the completion: {_error_text(chunk)}")
            for choice in chunk["choices"]:
                self.end = choice.get("finish_reason") or self.end
                if text := choice["delta"].get("content"):
                    yield str(text)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise TurnError(f"the server sent an invalid chunk: {one_line(data)[:80]}") from None


def choose_model(client: httpx2.Client, model: str | None) -> str:
    """The model to use: `model`, if the server has it; `model` None: the server's first model.

    Raises:
        TurnError: the server cannot be reached, refuses the key, or does not have the model.
    """
    place = _public_address(client.base_url)
    with _connection_errors():
        response = client.get("/v1/models")
        _check_status(response)
    try:
        names = [str(each["id"]) for each in response.json()["data"]]
    except (ValueError, LookupError, TypeError):
        raise TurnError(f"the server at {place} is not OpenAI-compatible; give another --url", EXIT_BAD_INPUT) from None
    if not names:
        raise TurnError(f"the server at {place} lists no model; check --url")
    if model is None:
        return names[0]
    if model not in names:
        known = ", ".join(map(one_line, names))
        raise TurnError(f"{place} has no model {one_line(model)!r}; it has: {known}", EXIT_BAD_INPUT)
    return model


def _run_conversation(chat: Chat) -> int:
    """Run a conversation on a terminal."""
    with suppress(ImportError):
        import readline  # noqa: F401  (lets `input` edit and recall lines)
    print("Ctrl-C stops a completion, Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            question = input(PROMPT)
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return EXIT_OK
        if not question.strip():
            continue
        try:
            _print_completion(chat, question)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
        except TurnError as error:
            print()
            _print_error(error)


def _send_each_line(chat: Chat) -> int:
    """Send one message per line; continue after a failed message, unless the server cannot be reached."""
    worst = EXIT_OK
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            _print_completion(chat, line.rstrip("\r\n"))
        except TurnError as error:
            if isinstance(error.__cause__, httpx2.TransportError):
                raise CommandError(str(error), EXIT_FAILED) from None
            print(flush=True)
            _print_error(error)
            worst = max(worst, error.exit_code)
    return worst


def _print_completion(chat: Chat, question: str) -> None:
    with closing(chat.ask(question)) as pieces:  # closing it on an interrupt disconnects from the server
        for piece in pieces:
            # A model may generate any character, and a terminal interprets some of them.
            print(printable(piece), end="", flush=True)
    print(flush=True)
    if chat.end in ENDS:
        print(f"({ENDS[chat.end]})", file=sys.stderr, flush=True)


def _make_client(url: str, api_key: str | None) -> httpx2.Client:
    """A client of the server at `url`.

    Raises:
        CommandError: the address or the key cannot be used.
    """
    try:
        base = httpx2.URL(server_url(url))
    except httpx2.InvalidURL as error:
        raise CommandError(f"--url is {url!r}: {error}; write for example {DEFAULT_URL}") from None
    headers = key_headers(api_key)
    return httpx2.Client(base_url=base, headers=headers, timeout=TIMEOUT, trust_env=base.host not in LOOPBACK)


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Context that raises failures of the connection as TurnError."""
    try:
        yield
    except httpx2.ConnectError as error:
        where = _public_address(error.request.url)
        reason = one_line(str(error)) or "no connection"
        raise TurnError(f"cannot reach {where} ({reason}); start it with pointsman serve, or give --url") from error
    except httpx2.TransportError as error:
        raise TurnError(f"the connection failed: {one_line(str(error)) or type(error).__name__}") from error


def _check_status(response: httpx2.Response) -> None:
    """Raise TurnError if the response's status is not a success."""
    if response.is_success:
        return
    response.read()
    status = response.status_code
    try:
        message = _error_text(response.json())
    except ValueError:
        message = one_line(response.text)[:200] or response.reason_phrase
    if status == 401:
        message = "the server wants an API key; give --api-key, or set POINTSMAN_API_KEY"
    elif "retry-after" in response.headers:
        message += f" (try again in {one_line(response.headers['retry-after'])} s)"
    refused = 400 <= status < 500 and status not in (408, 429)
    raise TurnError(f"{message} (HTTP {status})", EXIT_BAD_INPUT if refused else EXIT_FAILED)


def _error_text(body: Any) -> str:
    """The error message in a response's body, on one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return one_line(str(message))[:400]


def _make_message(role: str, content: str) -> dict[str, str]:
    """A message of the history, without lone surrogates: arguments and models may contain them, but they cannot be
    encoded."""
    return {"role": role, "content": content.encode("utf-8", "replace").decode("utf-8")}


def _public_address(url: httpx2.URL) -> str:
    """The server's address without the parts of a URL that may be secret."""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}" if url.port is None else f"{url.scheme}://{host}:{url.port}"


def _print_error(error: TurnError) -> None:
    print(f"pointsman: error: {error}", file=sys.stderr, flush=True)
