"""What a run did and what a checkpoint holds, as numbers, tables and one page."""
