"""verl loads this module in every process that imports verl (entry point `verl.plugins`)."""
