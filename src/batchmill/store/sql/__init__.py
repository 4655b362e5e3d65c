"""What both databases share: the procedures, as SQL."""
