"""The two deployments of the Serve application: `Api`, and `EngineHost`, whose replicas run its engines.

`Api` calls `EngineHost.host` once for each engine that there may be, and each call lasts as long as its engine. A
replica takes as many calls as it has engines; the others wait in Serve's queue for a replica that is started. So Serve
itself finds the replicas, and reports those that are lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from typing import Any

from pointsman.engine.errors import first_line
from pointsman.engine.machine import wait_briefly
from pointsman.engine.stats import DEFAULT_INTERVAL
from pointsman.engine.text.tokenizer import model_directory
from pointsman.integrations.ray.arguments import RaySettings
from pointsman.integrations.ray.autoscaling import METRIC, POLICY, Load, replicas_wanted
from pointsman.server.serve import DEFAULT_RESTARTS, check_chat_template, log_to_stderr, warm_tokenizer
from pointsman.server.service.engine_client import EngineStartError
from pointsman.server.service.fleet import DEFAULT_RESUMES, EngineFleet, start_fleet
from pointsman.server.service.remote import EngineListener, Invitation, host_engine
from pointsman.server.shares import share_out
from pointsman.server.wire.messages import Start

logger = logging.getLogger(__name__)

API, ENGINES = "api", "engines"
"""Names of the deployments."""
MAX_ONGOING_REQUESTS = 100_000
"""Of the API, which refuses by itself what is too much (`service/backlog.py`)."""
SECONDS_TO_LEAVE = 1.0
"""That a replica of engines has when Serve stops it; its requests go on in another."""
SECONDS_TO_CLOSE = 10.0
"""That the API has beside `drain_timeout`."""
SECONDS_BETWEEN_LOADS = 1.0
"""For which an answer to `replicas_wanted` holds."""
NEVER_GIVES_UP = sys.maxsize


class Api:
    """The API process of `pointsman serve`, with engines that run in replicas of `EngineHost`."""

    async def __init__(self, settings: RaySettings, engines: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """Returns when the first engine has loaded its model.

        Args:
            settings: of the application.
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
        serve = settings.serve
        template = serve.server.chat_template
        if template is not None:
            await asyncio.to_thread(check_chat_template, template, serve.engine["model"])
        options = serve.options
        start = Start(
            serve.engine,
            options.get("record"),
            options.get("log_stats_interval", DEFAULT_INTERVAL),
            options.get("max_step_retries", 0),
            options.get("warm_up", True),
        )
        self._listener = await EngineListener.open(ray.util.get_node_ip_address(), self._launch, start)
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

    async def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def _launch(self, invitation: Invitation) -> int:
        """Have a replica host an engine; returns its exit code when it has ended."""
        response = self._engines.host.remote(invitation)
        try:
            code: int = await response
            return code
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:  # any of Ray's: the replica is gone, or raised something
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ValueError):
                raise ValueError(first_line(cause)) from None
            raise EngineStartError(f"{type(cause).__name__}: {first_line(cause)}") from error

    async def replicas_wanted(self) -> int:
        """Replicas of engines that the open requests need."""
        fleet, now = self._fleet, time.monotonic()
        if fleet is not None and now - self._wanted_at >= SECONDS_BETWEEN_LOADS:
            self._wanted_at = now
            self._wanted = replicas_wanted(
                [Load(stats.scheduler.num_running, stats.scheduler.num_waiting) for stats in await fleet.stats()],
                fleet.num_unsent,
                self._settings.engines_per_replica,
                fleet.info.max_num_running,
                self._settings.target_ongoing_requests,
            )
        return self._wanted

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        if self._fleet is not None:
            self._fleet.check_health()

    async def __del__(self) -> None:
        await self._close()

    async def _close(self) -> None:
        fleet, self._fleet = self._fleet, None
        listener, self._listener = self._listener, None
        if fleet is not None:
            await fleet.shutdown()
        if listener is not None:
            await listener.close()


class EngineHost:
    """Runs engines for the API, each a process of this replica."""

    def __init__(self, settings: RaySettings) -> None:
        """Check what can be checked on this node.

        Raises:
            ValueError: the node is too small for the engines, or has not the model.
        """
        log_to_stderr()
        wait_briefly()  # for the engine processes, which inherit it
        serve = settings.serve
        count = settings.engines_per_replica
        options = dict(serve.engine)
        directory = model_directory(options["model"])
        if not directory.is_dir():  # the node has come after `build_app` looked
            raise ValueError(
                f"model is {directory}, and there is no such directory on {socket.gethostname()}; copy it there, or "
                "keep replicas off this node with a resource that it lacks (ray_actor_options)"
            )
        num_cpus = settings.engine_options.get("ray_actor_options", {}).get("num_cpus")
        if count > 1 and num_cpus and "num_threads" not in options:
            options["num_threads"] = max(count, int(num_cpus))  # shared out
        self._free = share_out(options, count)
        default = 0 if count == 1 else DEFAULT_RESTARTS
        self._max_failures = serve.options.get("max_engine_restarts", default)
        self._num_failures = 0
        self._death = ""
        self._api: Any = None

    async def host(self, invitation: Invitation) -> int:
        """Run an engine until it ends; returns its exit code.

        Raises:
            RuntimeError: this replica has all its engines already.
            ConnectionError: the API cannot be reached from here.
        """
        if self._death:
            await asyncio.Event().wait()  # until Serve replaces this replica
        if not self._free:
            raise RuntimeError("all engines of this replica are in use; one more comes with the next replica")
        share = self._free.pop()
        try:
            code = await host_engine(invitation, share.options, share.cores)
        finally:
            self._free.append(share)
        if code:
            self._num_failures += 1
            logger.error("engine %d ended with exit code %d", invitation.index, code)
            if self._num_failures > self._max_failures:
                self._death = f"engine {invitation.index} ended with exit code {code}, and {self._num_failures} in all"
        return code

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises.

        Raises:
            RuntimeError: more of its engines died than may be started again.
        """
        if self._death:
            raise RuntimeError(f"{self._death}; at most {self._max_failures} are started again (max_engine_restarts)")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of replicas that the API wants."""
        from ray import serve

        if self._api is None:
            self._api = serve.get_deployment_handle(API, app_name=serve.get_replica_context().app_name)
        try:
            return {METRIC: float(await asyncio.wait_for(self._api.replicas_wanted.remote(), SECONDS_BETWEEN_LOADS))}
        except Exception:  # the API is not there yet, or is being replaced
            return {}


def application(settings: RaySettings) -> Any:
    """The Serve application of these settings."""
    from ray import serve

    options = dict(settings.engine_options)
    if settings.autoscaling is None:
        options["num_replicas"] = settings.num_replicas
    else:
        options["autoscaling_config"] = {**settings.autoscaling, "policy": {"policy_function": POLICY}}
    engines = serve.deployment(
        EngineHost,
        name=ENGINES,
        max_ongoing_requests=settings.engines_per_replica,
        graceful_shutdown_timeout_s=SECONDS_TO_LEAVE,
        **options,
    )
    api = serve.deployment(
        serve.ingress()(Api),
        name=API,
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=settings.api_actor_options,
        graceful_shutdown_timeout_s=settings.serve.server.drain_timeout + SECONDS_TO_CLOSE,
        logging_config={"enable_access_log": False},  # a line for each request, as `pointsman serve` has none
    )
    return api.bind(settings, engines.bind(settings))
