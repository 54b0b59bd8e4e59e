"""The gate of a server that shuts down."""

from __future__ import annotations

import asyncio

from pointsman.server.service.gate import Gate


def test_who_is_inside_is_waited_for() -> None:
    async def run() -> None:
        gate = Gate()
        await gate.wait_empty()
        assert gate.enter() and gate.enter() and gate.num_open == 2
        gate.close()
        assert not gate.enter() and gate.num_open == 2
        waiting = asyncio.ensure_future(gate.wait_empty())
        gate.leave()
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.leave()
        await asyncio.wait_for(waiting, 1)
        assert gate.num_open == 0

    asyncio.run(run())
