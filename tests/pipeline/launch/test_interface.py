from pipeline.launch.interface import interface_of, own_address


def test_this_machine_is_reached_by_loopback() -> None:
    address = own_address("127.0.0.1")

    assert address == "127.0.0.1"
    assert interface_of(address) in ("lo", "lo0")


def test_a_name_that_nobody_knows_has_no_way() -> None:
    assert own_address("no-such-machine.invalid") is None


def test_an_address_of_another_machine_is_on_no_interface() -> None:
    assert interface_of("203.0.113.9") is None
