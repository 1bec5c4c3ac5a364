"""Files and folders in object stores: paths with the methods of local ones, local copies, uploads, and the lease."""
