"""Links that processes share queue."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Disaggregated, Pool
from pdlab.rehearsal.shared_state import RehearsalFolder, SharedLinks
from pdlab.sim.hardware import load_hardware
from pdlab.sim.kv_transfer import LinkKind, transfer_costs

SHAPE = require_shape("gpt-oss-120b")
PD = Disaggregated(prefill=Pool(tp=4, replicas=2), decode=Pool(tp=4, replicas=2), placement="spread")


def links(folder: Path, kind: LinkKind, nodes: tuple[str, str]) -> SharedLinks:
    """As one engine has them: its own view of the folder."""
    return SharedLinks(transfer_costs(load_hardware("h100-vllm-0.11"), SHAPE, PD, kind), RehearsalFolder(folder), nodes)


def receiver() -> SimpleNamespace:
    return SimpleNamespace(link_free_s=0.0, link_busy_s=0.0)


def test_two_engines_fetch_from_one_in_turn(tmp_path: Path) -> None:
    size = 1e9
    one, other = links(tmp_path, "srd", ("a", "b")), links(tmp_path, "srd", ("a", "c"))
    first_s = one.carry(one._folder.end("end-p"), receiver(), size, 10.0)
    second_s = other.carry(other._folder.end("end-p"), receiver(), size, 10.0)
    takes_s = size / one.costs.prefill_bytes_per_s
    assert first_s == pytest.approx(10.0 + takes_s + one.costs.setup_s)
    assert second_s == pytest.approx(first_s + takes_s)


def test_from_two_engines_over_a_wire_of_their_node_in_turn_too(tmp_path: Path) -> None:
    size = 1e8
    one, other = links(tmp_path, "tcp", ("a", "b")), links(tmp_path, "tcp", ("a", "c"))
    elsewhere = links(tmp_path, "tcp", ("d", "e"))
    first_s = one.carry(one._folder.end("end-p"), receiver(), size, 10.0)
    second_s = other.carry(other._folder.end("end-q"), receiver(), size, 10.0)
    takes_s = size / one.costs.prefill_bytes_per_s
    assert second_s == pytest.approx(first_s + takes_s)
    assert elsewhere.carry(elsewhere._folder.end("end-r"), receiver(), size, 10.0) == pytest.approx(first_s)


def test_within_a_node_engines_do_not_wait_for_each_other(tmp_path: Path) -> None:
    one = links(tmp_path, "nvlink", ("a", "a"))
    first_s = one.carry(one._folder.end("end-p"), receiver(), 1e9, 10.0)
    assert one.carry(one._folder.end("end-q"), receiver(), 1e9, 10.0) == pytest.approx(first_s)


def fetch_often(folder: Path) -> None:
    mine = links(folder, "srd", ("a", "b"))
    for _ in range(50):
        mine.carry(mine._folder.end("end-p"), receiver(), 1e6, 0.0)


def test_no_transfer_is_lost_between_processes(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("spawn").Process(target=fetch_often, args=(tmp_path,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert all(worker.exitcode == 0 for worker in workers)
    mine = links(tmp_path, "srd", ("a", "b"))
    takes_s = 1e6 / mine.costs.prefill_bytes_per_s
    assert mine._folder.end("end-p").link_free_s == pytest.approx(100 * takes_s)
    assert mine._folder.end("end-p").link_busy_s == pytest.approx(100 * takes_s)
