"""A calculator as tools: `--environment calculator --reward math`.

`python -m pipeline.demo.arithmetic --calculator true` writes rows for it, whose demonstrations call
it. The reward is of the last answer, by whichever source reads it.
"""


class Calculator:
    """Sums, differences, products and quotients of numbers."""

    INSTRUCTIONS = ""  # the demonstrations show how it is called

    def reset(self, **row: object) -> None:
        """Nothing is kept from one call to the next."""

    def add(self, a: float, b: float) -> float:
        """The sum a + b."""
        return a + b

    def subtract(self, a: float, b: float) -> float:
        """The difference a - b."""
        return a - b

    def multiply(self, a: float, b: float) -> float:
        """The product a * b."""
        return a * b

    def divide(self, a: float, b: float) -> float:
        """The quotient a / b."""
        if b == 0:
            raise ValueError("the divisor is 0")
        try:
            return a / b
        except OverflowError:
            raise ValueError("the quotient has too many digits") from None
