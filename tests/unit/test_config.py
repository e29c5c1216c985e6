"""What a user writes, and what is said when it is wrong: the class of the error, and the name that the user gave."""

from __future__ import annotations

from typing import Any

import pytest

from torchwcache.config import Access, ModelConfig, Policy, access_from, policies_from, timeout_from
from torchwcache.errors import ConfigError


@pytest.mark.parametrize("constants", ["*.inv_freq", ("a", 1), {"a"}, 3])
def test_constants_are_a_list_of_patterns(constants: Any) -> None:
    # A string would be taken for its characters, and "*" among them shares every buffer.
    with pytest.raises(ConfigError, match="constants="):
        ModelConfig("x", constants=constants)
    assert ModelConfig("x", constants=["*.inv_freq"]).constants == ("*.inv_freq",)


def test_a_wrong_policy_is_named_after_where_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^TORCHWCACHE_FALLBACK='never'"):
        policies_from(fallback="load", environ={"TORCHWCACHE_FALLBACK": "never"})
    with pytest.raises(ConfigError, match=r"^fallback='never'"):
        policies_from(fallback="never", environ={})
    assert policies_from(fallback="load", environ={"TORCHWCACHE_FALLBACK": "error"}).on_refused is Policy.ERROR


def test_a_wrong_access_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'copy-on-write', 'readonly'"):
        access_from("read-only")
    assert access_from("readonly") is Access.READONLY


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "60"])
def test_a_wrong_timeout_is_a_config_error(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s="):
        timeout_from(seconds)
    assert timeout_from(0) == 0
