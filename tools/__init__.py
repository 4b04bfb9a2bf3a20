"""Scripts for those who work on gfn_rb."""
