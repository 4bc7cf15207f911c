"""Small bridges to other frameworks. They import segcal; segcal never imports them."""
