"""Published claims about tiled attention, each proved or put right by the test that bears it."""
