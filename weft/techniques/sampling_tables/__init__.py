"""Systems that sample over ranks, each as a table of rows with ages, one file each."""
