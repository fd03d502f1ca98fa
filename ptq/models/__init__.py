"""What is known of a model before it is touched: the table of families, its sizes, and what its blocks hand on."""
