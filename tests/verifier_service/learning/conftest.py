"""The engines that tests of local drafting share."""

from tests.verifier_service.drafting.conftest import checkpoints, pools

__all__ = ["checkpoints", "pools"]
