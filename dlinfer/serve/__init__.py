"""``dlinfer serve``: servers of one model, on one machine or several, behind a router."""
