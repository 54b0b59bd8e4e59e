"""The tables of docs/reference/models.md list exactly the models that the tests check."""

from __future__ import annotations

import re

import pytest

from tests.engine.model_table import DOCUMENT, with_tables
from tests.engine.tiny_models import FAMILIES, REFUSED, THOROUGH


def test_the_tables_of_the_models_page_are_up_to_date() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(written) == written, "run python tests/engine/model_table.py"


def test_every_tested_configuration_is_on_the_models_page() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    refused = [refusal.family for refusal in REFUSED.values()]
    for table, families in (("exact", FAMILIES.values()), ("refused", refused)):
        _, _, rows = document.partition(f"<!-- {table} -->\n| ")[2].partition("\n")  # below the headings
        rows = rows.partition(f"<!-- end of {table} -->")[0]
        assert sorted(re.findall(r"`([\w-]+)`", rows)) == sorted(family.model_type for family in families)
    assert set(THOROUGH) <= set(FAMILIES) and not set(FAMILIES) & set(REFUSED)


def test_a_document_without_comments_around_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places for the table 'refused'"):
        with_tables("<!-- exact -->\n<!-- end of exact -->")
