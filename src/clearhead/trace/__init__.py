"""What one model run looked at: recorded, kept with named axes, saved and loaded."""
