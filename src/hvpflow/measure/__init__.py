"""What is measured at one checkpoint: directions, epoch passes, records, and the store of finished work."""
