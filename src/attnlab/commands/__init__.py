"""What each command of the command line does, one module or room per verb."""
