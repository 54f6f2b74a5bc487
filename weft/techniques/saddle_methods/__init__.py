"""Methods for saddle points (:class:`weft.saddle.saddle_method.SaddleMethod`); ``saddle.method`` names them."""
