"""Token-balanced two-stage prefill splitting for attention-FFN disaggregation."""
