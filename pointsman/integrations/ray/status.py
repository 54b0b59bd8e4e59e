"""What replicas read from the status of their application: whether it ends, how many engines there should be,
and whether some are stopped. Serve calls nothing in a replica that it stops before all its requests have finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DELETING, STOPPING = "DELETING", "STOPPING"
"""Serve's names for states of an application and of a replica."""


class StatusWatch:
    """Made in a replica of the API when it begins to serve.

    Args:
        app: the application's name.
        api, engines: the names of its deployments; that of the API has one replica.

    Attributes:
        is_ending: whether this replica of the API is being stopped.
        num_replicas: of engines, that run or should; None before the first look.
    """

    def __init__(self, app: str, api: str, engines: str) -> None:
        self.is_ending = False
        self.num_replicas: int | None = None
        self._app = app
        self._api = api
        self._engines = engines
        self._num_stopping: int | None = None

    def look(self, applications: Mapping[str, Any]) -> None:
        """Take in a status.

        Args:
            applications: of Serve's `ServeStatus`.
        """
        app = applications.get(self._app)
        if app is None:  # the controller has just started, and does not know it yet
            return
        states = {name: deployment.replica_states for name, deployment in app.deployments.items()}
        if engines := states.get(self._engines):
            self.num_replicas = sum(engines.values()) - engines.get(STOPPING, 0)
        # One may be stopping that this one replaces. It is this one's turn when there is one more.
        num_stopping = states.get(self._api, {}).get(STOPPING, 0)
        before = num_stopping if self._num_stopping is None else self._num_stopping
        self.is_ending = app.status == DELETING or num_stopping > before
        self._num_stopping = num_stopping


def is_scaled_down(applications: Mapping[str, Any], app: str, api: str, engines: str) -> bool:
    """Whether replicas of engines are being stopped, and the API, which would end them, is not.

    Args:
        applications: of Serve's `ServeStatus`.
        app: the application's name.
        api, engines: the names of its deployments.
    """
    found = applications.get(app)
    if found is None or found.status == DELETING:
        return False
    stopping: dict[str, int] = {
        name: deployment.replica_states.get(STOPPING, 0) for name, deployment in found.deployments.items()
    }
    return stopping.get(engines, 0) > 0 and stopping.get(api, 0) == 0
