"""The page of a frontier: one moves the targets, and reads the highest rate of each curve within them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pointsman.web.page import assemble


def frontier_page(values: Mapping[str, Any]) -> str:
    """The HTML of the page.

    Args:
        values: what `pointsman frontier --json` prints.
    """
    data = {"frontier-data": json.dumps(values, allow_nan=False).encode()}
    return assemble("frontier", f"Frontier: {values['workload']}", has_view=False, data=data)
