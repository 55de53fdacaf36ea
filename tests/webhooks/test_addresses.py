"""Which addresses are global: against the standard library, and against a table of what it does not know."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.service.webhooks.addresses import (
    AllowList,
    UrlRefused,
    check_url,
    is_global,
    parse_address,
    why_not_global,
)

# Global by the registry, refused all the same: protocol anycast, dead 6to4 relays, and a cloud's host agent.
STRICTER_4 = [IPv4Network(block) for block in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")]
STRICTER_6 = [IPv6Network(block) for block in ("2001::/23", "2002::/16", "3fff::/20")]
MAPPED, NAT64 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")


def by_the_library(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@given(st.ip_addresses(v=4).map(lambda address: IPv4Address(str(address))))
@example(IPv4Address("100.64.0.0"))
@example(IPv4Address("100.128.0.0"))
@example(IPv4Address("172.15.255.255"))
@example(IPv4Address("172.32.0.0"))
@example(IPv4Address("255.255.255.255"))
def test_ipv4_is_as_the_library_says(address: IPv4Address) -> None:
    if any(address in network for network in STRICTER_4):
        assert not is_global(address)
    else:
        assert is_global(address) == by_the_library(address)


@given(
    st.one_of(
        st.integers(0, 2**128 - 1),
        st.integers(2**125, 3 * 2**125 // 2),
        st.integers(0, 2**32 - 1),
        st.integers(0x2001 << 112, 0x2004 << 112),
    ).map(IPv6Address)
)
def test_ipv6_is_never_global_where_the_library_says_otherwise(address: IPv6Address) -> None:
    if address in MAPPED or address in NAT64:
        return
    if is_global(address):
        assert by_the_library(address)
    elif address in IPv6Network("2000::/3"):
        assert not by_the_library(address) or any(address in network for network in STRICTER_6)


@given(st.integers(0, 2**32 - 1), st.sampled_from([MAPPED, NAT64]))
def test_what_carries_an_ipv4_address_is_what_that_is(number: int, carrier: IPv6Network) -> None:
    assert is_global(IPv6Address(int(carrier[0]) + number)) == is_global(IPv4Address(number))


@given(st.integers(0, 2**32 - 1))
def test_tunnels_are_never_global(number: int) -> None:
    carried = [
        IPv6Address(number),  # IPv4-compatible
        IPv6Address((0x2002 << 112) + (number << 80)),  # 6to4
        IPv6Address((0x2001_0000 << 96) + (number << 64)),  # Teredo, its server
        IPv6Address((0x2001_0000 << 96) + (number ^ 0xFFFF_FFFF)),  # Teredo, its client
        IPv6Address(int(IPv6Address("64:ff9b:1::")) + number),  # local NAT64
        IPv6Address(int(IPv6Address("::ffff:0:0:0")) + number),  # IPv4-translated
    ]
    assert not any(map(is_global, carried))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0.0.0.0", "unspecified"),
        ("10.255.0.1", "private"),
        ("100.100.100.200", "carrier-grade"),
        ("127.255.255.254", "loopback"),
        ("168.63.129.16", "host agent"),
        ("169.254.169.254", "link-local"),
        ("192.0.2.1", "documentation"),
        ("192.0.0.192", "protocols"),
        ("198.19.0.1", "benchmarking"),
        ("239.255.255.250", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::127.0.0.1", "IPv4-compatible"),
        ("::ffff:127.0.0.1", "loopback"),
        ("64:ff9b::a00:1", "private"),
        ("64:ff9b:1::808:808", "local NAT64"),
        ("100::1", "reserved"),
        ("2001:0:808:808::1", "Teredo"),
        ("2001:db8::1", "documentation"),
        ("2002:808:808::1", "6to4"),
        ("3fff::1", "documentation"),
        ("4000::1", "reserved"),
        ("5f00::1", "reserved"),
        ("fd00:ec2::254", "unique local"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "zone"),
        ("2606:4700::1111%1", "zone"),
        ("fec0::1", "site-local"),
        ("ff0e::1", "multicast"),
    ],
)
def test_why_an_address_is_not_global(text: str, kind: str) -> None:
    assert kind in str(why_not_global(ip_address(text)))


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2620:0:2d0::1"]
)
def test_global_addresses(text: str) -> None:
    assert why_not_global(ip_address(text)) is None


def test_what_is_no_address() -> None:
    assert parse_address("hooks.example") is None


def test_the_allow_list_takes_names_addresses_and_networks() -> None:
    allowed = AllowList.parse(["Hooks.Internal", " 10.1.0.0/16", "::1", "bücher.example", "hook1"])
    assert allowed.hosts == {"hooks.internal", "xn--bcher-kva.example", "hook1"}
    assert allowed.has(ip_address("10.1.255.255"))
    assert allowed.has(ip_address("::ffff:10.1.2.3"))
    assert allowed.has(ip_address("::1"))
    assert not allowed.has(ip_address("::1%lo"))
    assert not allowed.has(ip_address("10.2.0.0"))
    assert not allowed.has(ip_address("127.0.0.1"))


@pytest.mark.parametrize(
    "entry", ["10.1.2.3/16", "10.1", "0x7f000001", "https://hooks.internal", "a..b", "", "::g", "*"]
)
def test_an_entry_that_means_nothing_is_named(entry: str) -> None:
    with pytest.raises(InvalidRequest, match=r"webhook_allow: .* is neither a host name nor") as error:
        AllowList.parse(["hooks.internal", entry])
    assert repr(entry) in str(error.value)


@given(st.one_of(st.text(), st.text().map("https://{}".format), st.from_regex(r"https?://[\w.\-:%@\[\]]{1,40}/?")))
@example("https://①②⑦.0.0.1/")
def test_no_text_gets_through_as_an_address_that_is_not_global(url: str) -> None:
    try:
        target = check_url(url, AllowList())
    except UrlRefused:
        return
    assert target.address is None or is_global(target.address)
    assert target.scheme == "https"
    assert target.host.isascii()
    assert not target.host.rpartition(".")[2].isdigit() or target.address is not None
