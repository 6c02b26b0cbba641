"""Host lists expand as Slurm expands them, and every list survives being written and read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.cluster.launchers.base import MAX_HOSTS, expand_hosts
from hpcdl.core.errors import UsageError
from tests.lab.slurm import SlurmLab

EXAMPLES = {
    "": [],
    "n1": ["n1"],
    "n1,n2": ["n1", "n2"],
    "n1 n2\nn3": ["n1", "n2", "n3"],
    "c401-[001-004,010]": ["c401-001", "c401-002", "c401-003", "c401-004", "c401-010"],
    "n[08-10]": ["n08", "n09", "n10"],
    "n[8-10]": ["n8", "n9", "n10"],
    "n[099-101]": ["n099", "n100", "n101"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "n[1,3]-ib,login1": ["n1-ib", "n3-ib", "login1"],
    "node[3-3].site.org": ["node3.site.org"],
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples(text: str) -> None:
    assert expand_hosts(text) == EXAMPLES[text]


@pytest.mark.lab
def test_slurm_agrees(lab_slurm: SlurmLab) -> None:
    """Slurm itself agrees; it accepts neither blanks nor text after an item's last bracket."""
    lists = [text for text in EXAMPLES if text and not re.search(r"\s|\][^,\[]+(,|$)", text)]
    assert len(lists) > 5
    for text in lists:
        finished = lab_slurm.run(["scontrol", "show", "hostnames", text])
        assert finished.out.split() == expand_hosts(text)


@pytest.mark.parametrize(
    "text, word",
    [
        ("n[1-2", "unmatched bracket"),
        ("n1-2]", "unmatched bracket"),
        ("n[[1]]", "unmatched bracket"),
        ("n[2-1]", "runs backwards"),
        ("n[]", "''"),
        ("n[a]", "'a'"),
        ("n[1-2-3]", "'1-2-3'"),
        ("n[0-999999999]", "more than"),
        ("n[1-60000],m[1-60000]", "more than"),
    ],
)
def test_slips_are_one_line(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=r"^host list [^\n]*$") as caught:
        expand_hosts(text)
    assert word in str(caught.value)


NAMES = st.text(alphabet="abc-", min_size=1, max_size=4)


@given(st.lists(st.tuples(NAMES, st.integers(0, 2000), st.integers(0, 20), st.integers(1, 5)), max_size=5))
def test_ranges_are_what_they_say(parts: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{name}[{first:0{width}}-{first + more}]" for name, first, more, width in parts)
    expected = [f"{name}{i:0{width}}" for name, first, more, width in parts for i in range(first, first + more + 1)]
    assert expand_hosts(text) == expected


@given(st.text(alphabet="n[]-,12 ", max_size=20))
def test_any_text_is_hosts_or_one_line(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert len(hosts) <= MAX_HOSTS
        assert not any(character in host for host in hosts for character in "[], ")
