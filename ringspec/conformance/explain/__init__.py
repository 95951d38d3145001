"""Say in sentences what a target computes, from readout problems that it is run on."""
