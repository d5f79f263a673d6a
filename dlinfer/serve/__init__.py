"""``dlinfer serve``: several servers of one model behind a router. The servers run on one machine or on several."""
