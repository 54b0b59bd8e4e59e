"""Reads a Serve application's status from within the application's replicas: whether it is being stopped, its number of
replicas of engines, and whether replicas of engines are being stopped. Serve itself notifies a replica that it is being
stopped only after all requests of the replica have finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DELETING, STOPPING = "DELETING", "STOPPING"
"""Serve's names for the state of an application that is being deleted, and of a replica that is being stopped."""


class StatusWatch:
    """Follows the application's status in a replica of the API. Create it when the replica begins to serve.

    Args:
        app: the application's name.
        api, engines: names of the application's two deployments; the deployment of the API has one replica.

    Attributes:
        is_ending: whether this replica of the API is being stopped.
        num_replicas: number of replicas of engines that run or start; None before the first call of `read_status`.
    """

    def __init__(self, app: str, api: str, engines: str) -> None:
        self.is_ending = False
        self.num_replicas: int | None = None
        self._app = app
        self._api = api
        self._engines = engines
        self._num_stopping: int | None = None

    def read_status(self, applications: Mapping[str, Any]) -> None:
        """Process the newest status.

        Args:
            applications: status of each application by name, from Serve's `ServeStatus`.
        """
        app = applications.get(self._app)
        if app is None:  # the controller has just started, and does not know the application yet
            return
        states = {name: deployment.replica_states for name, deployment in app.deployments.items()}
        if engines := states.get(self._engines):
            self.num_replicas = sum(engines.values()) - engines.get(STOPPING, 0)
        # A replica that this one replaces may still be stopping. A further stopping replica is this one.
        num_stopping = states.get(self._api, {}).get(STOPPING, 0)
        before = num_stopping if self._num_stopping is None else self._num_stopping
        self.is_ending = app.status == DELETING or num_stopping > before
        self._num_stopping = num_stopping


def is_scaled_down(applications: Mapping[str, Any], app: str, api: str, engines: str) -> bool:
    """Whether engine replicas are being stopped although the API is not. (An end of the API stops them, too.)

    Args:
        applications: status of each application by name, from Serve's `ServeStatus`.
        app: the application's name.
        api, engines: names of the application's two deployments.
    """
    found = applications.get(app)
    if found is None or found.status == DELETING:
        return False
    stopping: dict[str, int] = {
        name: deployment.replica_states.get(STOPPING, 0) for name, deployment in found.deployments.items()
    }
    return stopping.get(engines, 0) > 0 and stopping.get(api, 0) == 0
