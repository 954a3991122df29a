"""Dynamic loss scaling, by hand."""

from pipeline.engine.precision import LossScaler


def test_an_overflow_halves_the_scale_and_a_full_window_of_good_steps_doubles_it() -> None:
    scaler = LossScaler(enabled=True, scale=64.0, window=3)
    scales = []

    for finite in (True, True, False, True, True, True, True):
        scaler.update(finite=finite)
        scales.append(scaler.scale)

    assert scales == [64, 64, 32, 32, 32, 64, 64]


def test_the_scale_never_falls_below_1() -> None:
    scaler = LossScaler(enabled=True, scale=1.5)

    for _ in range(3):
        scaler.update(finite=False)

    assert scaler.scale == 1.0


def test_a_scaler_that_is_off_stays_at_1() -> None:
    scaler = LossScaler(enabled=False, window=1)

    scaler.update(finite=True)
    scaler.update(finite=False)

    assert scaler.scale == 1.0
