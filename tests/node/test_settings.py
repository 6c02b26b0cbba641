from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.errors import ConfigError
from hpcdl.node.profile import ALLOCATORS, BINDINGS, MEMORY_POLICIES, Settings, chosen, describe, settings_from

ANY = st.builds(
    Settings,
    ranks_per_node=st.none() | st.integers(1, 64), intra_op_threads=st.none() | st.integers(1, 272),
    inter_op_threads=st.none() | st.integers(1, 8), threads_per_core=st.integers(1, 4),
    binding=st.sampled_from(BINDINGS), memory_policy=st.sampled_from(MEMORY_POLICIES), onednn=st.none() | st.booleans(),
    allocator=st.sampled_from(ALLOCATORS), xla=st.booleans(), kmp_blocktime=st.none() | st.integers(0, 200),
    batch_size=st.none() | st.integers(1, 512),
)  # fmt: skip


@given(ANY)
def test_chosen_settings_round_trip(settings: Settings) -> None:
    assert settings_from(chosen(settings), origin="test") == settings


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from({"intra_op_thread": 4, "binding": "tight", "onednn": "maybe"}, origin="p.toml")
    assert len(caught.value.problems) == 3
    assert "did you mean 'intra_op_threads'" in caught.value.problems[0]


def test_describe_is_one_line() -> None:
    text = describe(Settings(ranks_per_node=2, onednn=False))
    assert text == "ranks_per_node=2 threads_per_core=1 binding=balanced memory_policy=default onednn=false"
    assert dataclasses.replace(Settings(), xla=True) != Settings()
