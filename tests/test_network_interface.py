"""Which network interface the trainers' process group is told to use."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.host.addresses import VARIABLES, interface_of, ipv6_addresses, name_interface, own_address


def test_loopback_is_found_by_its_addresses() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""  # an address for documentation: nobody has it


def test_what_is_set_is_left_alone() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "eth7"}
    name_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7" and environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_without_torchrun_or_a_known_leader_nothing_is_set() -> None:
    for environ in ({}, {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "1"}):
        name_interface(environ)
        assert not set(VARIABLES) & set(environ)


def test_ipv6_addresses_are_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text("fd000000000000000000000000000007 02 40 00 80 eth0\n")
    assert ipv6_addresses(table) == [("eth0", "fd00::7")]
    assert ipv6_addresses(tmp_path / "absent") == []
