"""pytest plugin and gates that say whether a split prefill step may be trusted."""
