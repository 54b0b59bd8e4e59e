"""The two deployments of the Serve application: `Api`, and `EngineHost`, whose replicas run the API's engines.

`Api` calls `EngineHost.host` once for each possible engine, and each call lasts until its engine has ended. A replica
accepts one call for each of its engines; further calls wait in Serve's queue until another replica starts. So Serve
itself finds the replicas, and reports lost ones.

Shutdown: Serve stops both deployments at the same time, and notifies neither. `Api` polls the application's status and,
when the application is being stopped, `Api` ends as `pointsman serve` does (`status.py`). The engines run until `Api`
ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

from pointsman.cli.errors import log_to_stderr
from pointsman.engine.errors import ModelLoadError, first_line
from pointsman.engine.machine import wait_briefly
from pointsman.engine.stats import DEFAULT_INTERVAL
from pointsman.integrations.ray.arguments import RaySettings
from pointsman.integrations.ray.autoscaling import METRIC, POLICY, Load, num_replicas_needed
from pointsman.integrations.ray.status import StatusWatch, is_scaled_down
from pointsman.server.serve import (
    DEFAULT_RESTARTS,
    check_chat_template,
    warm_tokenizer,
    with_model_found,
)
from pointsman.server.service.engine_client import EngineStartError
from pointsman.server.service.fleet import DEFAULT_RESUMES, EngineFleet, start_fleet
from pointsman.server.service.heartbeat import DEFAULT_TIMEOUT
from pointsman.server.service.remote import EngineListener, HostLostError, Invitation, host_engine
from pointsman.server.shares import share_out
from pointsman.server.wire.messages import Start
from pointsman.server.wire.questions import Stats

logger = logging.getLogger(__name__)

API, ENGINES = "api", "engines"
"""Names of the deployments of `Api` and `EngineHost`."""
MAX_ONGOING_REQUESTS = 100_000
"""Maximum number of requests that Serve passes to the API, which refuses excess requests itself
(`service/backlog.py`)."""
SECONDS_TO_CLOSE = 10.0
"""Time beyond `drain_timeout` that a replica has to end when Serve stops it."""
SECONDS_TO_ANSWER = 1.0
"""Time that a replica waits before it ends, so that the exit code of its failed engine reaches the API."""
SECONDS_BETWEEN_LOOKS = 2.0
"""Interval at which the status of the application is read."""
PERIODS_OF_SILENCE = 5
"""Number of missed health checks after which a replica of engines checks whether Serve is stopping it."""
SECONDS_BETWEEN_LOADS = 1.0
"""Time for which a replica of engines reuses a result of `num_replicas_needed`."""
NEVER_GIVES_UP = sys.maxsize


class Api:
    """The API process of `pointsman serve`, with engines that run in replicas of `EngineHost`."""

    async def __init__(self, settings: RaySettings, engines: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engines, and return when the first engine has loaded its model.

        Args:
            settings: settings of the application.
            engines: Serve's handle for `EngineHost`.

        Raises:
            ValueError, EngineStartError: the model cannot be run, or no engine started.
        """
        import ray

        from pointsman.server.api.app import create_app

        log_to_stderr()
        self._settings = settings
        self._engines = engines
        self._wanted, self._wanted_at = 1, -SECONDS_BETWEEN_LOADS
        self._listener: EngineListener | None = None
        self._fleet: EngineFleet | None = None
        self._watching: asyncio.Task[None] | None = None
        serve = settings.serve
        engine = await asyncio.to_thread(with_model_found, serve.engine)
        template = serve.server.chat_template
        if template is not None:
            await asyncio.to_thread(check_chat_template, template, engine["model"])
        options = serve.options
        start = Start(
            engine,
            options.get("record"),
            options.get("log_stats_interval", DEFAULT_INTERVAL),
            options.get("max_step_retries", 0),
            options.get("warm_up", True),
            record_when_full=options.get("record_when_full", "stop"),
        )
        timeout = options.get("engine_timeout", DEFAULT_TIMEOUT)
        self._listener = await EngineListener.open(ray.util.get_node_ip_address(), self._launch, start, timeout)
        max_resumes = options.get("max_resumes", DEFAULT_RESUMES)
        try:
            self._fleet = await start_fleet(
                self._listener.start, settings.num_engines, NEVER_GIVES_UP, max_resumes, wait_for_all=False
            )
            if self._fleet.tokenizer is not None:
                await asyncio.to_thread(warm_tokenizer, self._fleet.tokenizer, template)
        except BaseException:
            await self._close()
            raise
        self._app = create_app(self._fleet, serve.server)
        self._app.add_middleware(WithoutRequestId)
        self._watching = asyncio.create_task(self._watch(self._fleet))

    async def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def _launch(self, invitation: Invitation) -> int:
        """Have a replica of `EngineHost` run an engine; return the engine's exit code when the engine has ended."""
        from ray.exceptions import RayActorError

        response = self._engines.host.remote(invitation)
        try:
            code: int = await response
            return code
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayActorError as error:
            raise HostLostError(f"{type(error).__name__}: {first_line(error)}") from error
        except Exception as error:  # another error of Ray's, or an exception of the replica
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ValueError):
                raise ValueError(first_line(cause)) from None
            raise EngineStartError(f"{type(cause).__name__}: {first_line(cause)}") from error

    async def num_replicas_needed(self) -> int:
        """Number of replicas of engines that the open requests need."""
        fleet, now = self._fleet, time.monotonic()
        if fleet is not None and now - self._wanted_at >= SECONDS_BETWEEN_LOADS:
            self._wanted_at = now
            self._wanted = num_replicas_needed(
                [
                    Load(stats.scheduler.num_running, stats.scheduler.num_waiting)
                    for stats in await fleet.ask_each(Stats())
                ],
                fleet.num_unsent,
                self._settings.engines_per_replica,
                fleet.info.max_num_running,
                self._settings.target_ongoing_requests,
            )
        return self._wanted

    async def _watch(self, fleet: EngineFleet) -> None:
        """Follow Serve's changes to the application: apply a changed number of engines, and end when the application is
        being stopped."""
        from ray import serve

        watch = StatusWatch(serve.get_replica_context().app_name, API, ENGINES)
        while not watch.is_ending:
            try:
                watch.read_status((await asyncio.to_thread(serve.status)).applications)
            except Exception as error:  # an error of Ray's: the controller is being restarted
                logger.debug("no status: %s", first_line(error))
            if self._settings.autoscaling is not None and watch.num_replicas is not None:
                fleet.num_wanted = watch.num_replicas * self._settings.engines_per_replica
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        await self._shut_down(fleet)

    async def _shut_down(self, fleet: EngineFleet) -> None:
        """Refuse new requests, let the open requests finish, abort the requests that are open after `drain_timeout`,
        and end the engines."""
        gate, seconds = self._app.state.gate, self._settings.serve.server.drain_timeout
        gate.close()
        if gate.num_open:
            logger.info("finishing %d open requests, at most %g s", gate.num_open, seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(gate.wait_empty(), seconds)
        if gate.num_open:
            logger.warning("%d requests did not finish in time and are aborted", gate.num_open)
        await fleet.shutdown()

    async def check_health(self) -> None:
        """Raise if Serve should replace this replica of the API."""
        if self._fleet is not None:
            self._fleet.check_health()

    async def __del__(self) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        fleet, self._fleet = self._fleet, None
        listener, self._listener = self._listener, None
        if fleet is not None:
            await fleet.shutdown()
        if listener is not None:
            await listener.close()


class WithoutRequestId:
    """ASGI middleware: removes the server's `x-request-id`. Serve's proxy sets this header itself, and the server's own
    id contains the proxy's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_without(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [one for one in message["headers"] if one[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_without)


class EngineHost:
    """Runs engines for the API, each in a process of this replica."""

    def __init__(self, settings: RaySettings) -> None:
        """Check that this node has the model and enough cores, and share out the cores among the engines.

        Raises:
            ValueError: the node is too small for the engines, or lacks the model and cannot download it.
        """
        log_to_stderr()
        wait_briefly()  # for the engine processes, which inherit the setting
        serve = settings.serve
        count = settings.engines_per_replica
        try:
            options = with_model_found(serve.engine)
        except ModelLoadError as error:  # the node joined after the checks of `build_app`, or its download fails
            raise ValueError(
                f"on {socket.gethostname()}: {error}; or keep replicas off this node with a resource that it lacks "
                "(ray_actor_options)"
            ) from None
        num_cpus = settings.engine_options.get("ray_actor_options", {}).get("num_cpus")
        if count > 1 and num_cpus and "num_threads" not in options:
            options["num_threads"] = max(count, int(num_cpus))  # threads of all engines together
        self._free = share_out(options, count)
        default = 0 if count == 1 else DEFAULT_RESTARTS
        self._max_failures = serve.options.get("max_engine_restarts", default)
        self._num_failures = 0
        self._is_leaving = False
        self._hosting: set[asyncio.Future[int]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._asked_at = time.monotonic()
        self._patience = PERIODS_OF_SILENCE * settings.engine_options["health_check_period_s"]
        self._api: Any = None

    async def host(self, invitation: Invitation) -> int:
        """Run an engine until it ends; return its exit code.

        Raises:
            RuntimeError: this replica already runs its maximum number of engines.
            ConnectionError: the API cannot be reached from here.
        """
        if self._is_leaving:
            await asyncio.Event().wait()  # until this replica ends and another one gets the call
        if not self._free:
            raise RuntimeError(
                "this replica already runs its maximum number of engines; a further engine needs another replica"
            )
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        share = self._free.pop()
        hosting = asyncio.ensure_future(host_engine(invitation, share.options, share.cores))
        self._hosting.add(hosting)
        try:
            code = await hosting
        except asyncio.CancelledError:
            if not self._is_leaving:
                raise
            code = 0
        finally:
            self._hosting.remove(hosting)
            self._free.append(share)
        if code:
            self._note_failure(code)
        return code

    def _note_failure(self, code: int) -> None:
        """End this replica if more of its engines have failed than may be restarted. Serve then starts another replica
        immediately.

        Raising in `check_health` would have the same effect, but takes seconds and logs three tracebacks.
        """
        import ray

        self._num_failures += 1
        ends = self._num_failures > self._max_failures
        what = "Serve replaces this replica" if ends else "the engine is started again"
        logger.error(
            "an engine process on %s ended with exit code %d (failure %d in this replica; max_engine_restarts is %d); "
            "%s",
            socket.gethostname(),
            code,
            self._num_failures,
            self._max_failures,
            what,
        )
        if ends and not self._is_leaving:
            self._is_leaving = True
            actor = ray.get_runtime_context().current_actor
            asyncio.get_running_loop().call_later(SECONDS_TO_ANSWER, partial(ray.kill, actor, no_restart=True))

    async def check_health(self) -> None:
        """Serve calls this method in replicas that it is not stopping, and replaces a replica in which it raises.

        Raises:
            RuntimeError: this replica has ended its engines, because it wrongly assumed that Serve is stopping it.
        """
        self._asked_at = time.monotonic()
        if self._is_leaving:
            raise RuntimeError("the engines of this replica have been ended")

    async def _watch(self) -> None:
        """End this replica's engines when autoscaling stops the replica. Other replicas then continue the requests of
        these engines without delay."""
        from ray import serve

        app = serve.get_replica_context().app_name
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            if time.monotonic() - self._asked_at < self._patience:
                continue
            try:
                applications = (await asyncio.to_thread(serve.status)).applications
            except Exception as error:  # an error of Ray's: the controller, which answers, is being restarted
                logger.debug("no status: %s", first_line(error))
                continue
            if is_scaled_down(applications, app, API, ENGINES):
                break
        logger.info("Serve stops this replica; other replicas continue its requests")
        self._is_leaving = True
        for hosting in self._hosting:
            hosting.cancel()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of replicas that the open requests need, as the API computes it; Serve calls this."""
        from ray import serve

        if self._api is None:
            self._api = serve.get_deployment_handle(API, app_name=serve.get_replica_context().app_name)
        try:
            return {
                METRIC: float(await asyncio.wait_for(self._api.num_replicas_needed.remote(), SECONDS_BETWEEN_LOADS))
            }
        except Exception:  # the API has not started yet, or is being replaced
            return {}


def application(settings: RaySettings) -> Any:
    """Build the Serve application from the settings."""
    from ray import serve

    options = dict(settings.engine_options)
    seconds_to_end = settings.serve.server.drain_timeout + SECONDS_TO_CLOSE
    if settings.autoscaling is None:
        options["num_replicas"] = settings.num_replicas
    else:
        options["autoscaling_config"] = {**settings.autoscaling, "policy": {"policy_function": POLICY}}
    engines = serve.deployment(
        EngineHost,
        name=ENGINES,
        max_ongoing_requests=settings.engines_per_replica,
        graceful_shutdown_timeout_s=seconds_to_end,
        logging_config={"enable_access_log": False},  # each call runs an engine, which logs by itself
        **options,
    )
    api = serve.deployment(
        serve.ingress()(Api),
        name=API,
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=settings.api_actor_options,
        graceful_shutdown_timeout_s=seconds_to_end,
        logging_config={"enable_access_log": False},  # no line for each request, as in `pointsman serve`
    )
    return api.bind(settings, engines.bind(settings))
