"""Each test of the Kubernetes manifests looks at both overlays."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes_objects import KUBERNETES, OVERLAYS
from tests.deploy.kustomize import Document, build


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[Document]:
    return build(KUBERNETES / "overlays" / request.param)
