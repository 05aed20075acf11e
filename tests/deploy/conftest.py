"""Each test of the chart looks at what it makes of each set of values."""

from __future__ import annotations

import functools

import pytest

from tests.deploy.helm import Document, render
from tests.deploy.kubernetes_objects import VALUES

rendered = functools.cache(lambda name: render(VALUES[name]))


@pytest.fixture(params=VALUES)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a set of values."""
    name: str = request.param
    return name


@pytest.fixture
def objects(kind: str) -> list[Document]:
    documents: list[Document] = rendered(kind)
    return documents
