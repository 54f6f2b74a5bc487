"""Sources of training samples other than files, one for each section of a recipe that asks for one."""
