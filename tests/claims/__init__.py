"""Published claims about tiled attention: each test proves or corrects the claim of its number."""
