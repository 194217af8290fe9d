"""The token Jacobian: its products by reverse and forward mode, sums, Grams, contributions, exact rows."""
