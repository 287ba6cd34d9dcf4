"""`quads study`: the paper's experiment in miniature, arms against each other over several seeds."""
