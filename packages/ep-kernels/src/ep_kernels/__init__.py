"""How experts compute: the MLP of a mixture-of-experts layer over rows grouped by expert."""
