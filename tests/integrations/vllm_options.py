"""Print the options of `vllm serve` of the installed vLLM as JSON: the names of each, and its number of values."""

from __future__ import annotations

import json

from vllm.utils.argparse_utils import FlexibleArgumentParser

from pointsman.integrations.vllm.check import _add_vllm_options


def main() -> None:
    actions = _add_vllm_options(FlexibleArgumentParser())._actions
    print(json.dumps([[each.option_strings, each.nargs] for each in actions if each.option_strings]))


main()
